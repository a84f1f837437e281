package kera

import (
	"context"
	"fmt"
	"sync/atomic"

	kerav1 "kera.example/client/kera/v1"
)

// layout is where the streamlets of a stream are, as the coordinator has said at one time.
type layout struct {
	stream      *kerav1.StreamInfo
	brokers     map[uint32]*kerav1.BrokerInfo
	assignments map[uint32]*kerav1.StreamletAssignment
}

func layoutOf(response *kerav1.DescribeStreamResponse) *layout {
	l := &layout{
		stream:      response.GetStream(),
		brokers:     map[uint32]*kerav1.BrokerInfo{},
		assignments: map[uint32]*kerav1.StreamletAssignment{},
	}
	for _, broker := range response.GetBrokers() {
		l.brokers[broker.GetBrokerId()] = broker
	}
	for _, assignment := range l.stream.GetAssignments() {
		l.assignments[assignment.GetStreamletId()] = assignment
	}
	return l
}

// owner is the broker that takes chunks for a streamlet.
func (l *layout) owner(streamlet uint32) uint32 {
	return l.assignments[streamlet].GetBrokerId()
}

// holder is the broker that has a group of a streamlet; group 0 is the oldest.
func (l *layout) holder(streamlet uint32, group uint64) uint32 {
	intervals := l.assignments[streamlet].GetIntervals()
	if len(intervals) == 0 {
		return l.owner(streamlet)
	}
	holder := intervals[0].GetBrokerId()
	for _, interval := range intervals {
		if interval.GetFirstGroupId() > group {
			break
		}
		holder = interval.GetBrokerId()
	}
	return holder
}

// chunkBytesMax is what a chunk may have, so that each of the brokers takes it.
func (l *layout) chunkBytesMax() int {
	least := 0
	for _, broker := range l.brokers {
		if size := int(broker.GetSegmentBytes()); size > 0 && (least == 0 || size < least) {
			least = size
		}
	}
	return least
}

// schemaID is that of the default schema. It fails for a stream with a schema of its own.
func (l *layout) schemaID() (uint32, error) {
	schemas := l.stream.GetSchemas()
	if len(schemas) == 0 || schemas[len(schemas)-1].GetTyped() {
		return 0, &Error{
			Code: codeSchemaMismatch,
			Message: fmt.Sprintf(
				"stream %q has a schema of its own; this client knows the default one (timestamp, keys, value, headers)",
				l.stream.GetName(),
			),
		}
	}
	return schemas[len(schemas)-1].GetSchemaId(), nil
}

// view is the layout of a stream as it is known now, shared by all who find that it is old.
type view struct {
	client   *Client
	name     string
	streamID uint64
	layout   atomic.Pointer[layout]
	asking   chan struct{} // has one element while somebody asks for a newer one
}

// openView looks a stream up by its name.
func (c *Client) openView(ctx context.Context, name string) (*view, error) {
	response, err := c.describeStream(ctx, &kerav1.DescribeStreamRequest{
		Stream: &kerav1.DescribeStreamRequest_Name{Name: name},
	})
	if err != nil {
		return nil, fmt.Errorf("stream %q: %w", name, err)
	}
	l := layoutOf(response)
	if _, err := l.schemaID(); err != nil {
		return nil, err
	}
	v := &view{client: c, name: name, streamID: l.stream.GetStreamId(), asking: make(chan struct{}, 1)}
	v.layout.Store(l)
	return v, nil
}

// now is the layout as it is known.
func (v *view) now() *layout {
	return v.layout.Load()
}

// newer is a layout that is not the one that was found to be old: asked of the coordinator, unless somebody has by now.
// The stream goes by its id, as there may be another one of its name.
func (v *view) newer(ctx context.Context, old *layout) (*layout, error) {
	select {
	case v.asking <- struct{}{}:
		defer func() { <-v.asking }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if now := v.now(); now != old {
		return now, nil
	}
	response, err := v.client.describeStream(ctx, &kerav1.DescribeStreamRequest{
		Stream: &kerav1.DescribeStreamRequest_StreamId{StreamId: v.streamID},
	})
	if err != nil {
		return nil, fmt.Errorf("stream %q: %w", v.name, err)
	}
	v.layout.Store(layoutOf(response))
	return v.now(), nil
}
