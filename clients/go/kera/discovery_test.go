package kera

import (
	"context"
	"encoding/base64"
	"os"
	"strings"
	"testing"

	kerav1 "kera.example/client/kera/v1"
)

// TestDiscovery reads a stream by the calls of the thesis's tables 6.1 and 6.2 and MultiReadChunks, as
// docs/writing-a-client.md has it: the intervals come from brokers, and not from the coordinator. It runs against the
// cluster of KERA_DISCOVERY="coordinator stream file", and writes a line with each record's value to the file.
func TestDiscovery(t *testing.T) {
	given := strings.Fields(os.Getenv("KERA_DISCOVERY"))
	if len(given) != 3 {
		t.Skip("KERA_DISCOVERY names no cluster")
	}
	ctx := context.Background()
	client, err := Connect(ctx, Config{Coordinators: given[:1]})
	must(t, err)
	defer client.Close()
	cluster, err := client.describeCluster(ctx)
	must(t, err)
	d := &discovery{t: t, ctx: ctx, client: client, name: given[1], brokers: map[uint32]*peer{}}
	for _, broker := range cluster.Brokers {
		d.brokers[broker.BrokerId], err = client.peer(broker.GrpcAddress)
		must(t, err)
	}
	for _, assignment := range d.assignments() {
		d.streamlet(assignment.StreamletId, assignment.BrokerId)
	}
	must(t, os.WriteFile(given[2], []byte(strings.Join(d.values, "\n")), 0o600))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type discovery struct {
	t        *testing.T
	ctx      context.Context
	client   *Client
	name     string
	streamID uint64
	brokers  map[uint32]*peer
	values   []string
}

// assignments asks the coordinator where streamlets are, in their order.
func (d *discovery) assignments() []*kerav1.StreamletAssignment {
	described, err := d.client.describeStream(d.ctx, &kerav1.DescribeStreamRequest{
		Stream: &kerav1.DescribeStreamRequest_Name{Name: d.name},
	})
	must(d.t, err)
	d.streamID = described.Stream.StreamId
	return described.Stream.Assignments
}

// streamlet reads all groups of a streamlet, at one broker after the other. It begins with any broker that has some.
func (d *discovery) streamlet(streamlet, brokerID uint32) {
	request := &kerav1.GetAvailableGroupsRequest{StreamId: d.streamID, StreamletId: streamlet}
	answer, err := d.brokers[brokerID].broker.GetAvailableGroups(d.ctx, request)
	must(d.t, err)
	for answer.OwnerId != brokerID && answer.OwnerId != 0 { // only the owner knows all intervals
		brokerID = answer.OwnerId
		answer, err = d.brokers[brokerID].broker.GetAvailableGroups(d.ctx, request)
		must(d.t, err)
	}
	if answer.OwnerId == 0 { // the broker does not know the owner
		known := d.assignments()[streamlet]
		answer.OwnerId, answer.Intervals = known.BrokerId, known.Intervals
	}
	asked := map[uint32]bool{}
	for _, interval := range append(answer.Intervals, &kerav1.GroupInterval{BrokerId: answer.OwnerId}) {
		if !asked[interval.BrokerId] {
			asked[interval.BrokerId] = true
			d.groups(streamlet, d.brokers[interval.BrokerId])
		}
	}
}

// groups reads the groups of a streamlet that a broker has, each of which it gives to a consumer group once.
func (d *discovery) groups(streamlet uint32, at *peer) {
	for {
		given, err := at.broker.GetNextGroups(d.ctx, &kerav1.GetNextGroupsRequest{
			StreamId: d.streamID, StreamletId: streamlet, ConsumerGroup: "discovery",
		})
		must(d.t, err)
		if len(given.Groups) == 0 {
			return
		}
		for _, group := range given.Groups {
			segments, err := at.broker.GetNextSegments(d.ctx, &kerav1.GetNextSegmentsRequest{
				StreamId: d.streamID, StreamletId: streamlet, GroupId: group.GroupId,
			})
			must(d.t, err)
			for _, segment := range segments.Segments {
				d.segment(at, &kerav1.Cursor{
					StreamId: d.streamID, StreamletId: streamlet, Entry: group.Entry,
					GroupId: group.GroupId, SegmentId: segment.SegmentId,
				}, segment.DurableHead)
			}
		}
	}
}

// segment reads a segment from its start to its durable head.
func (d *discovery) segment(at *peer, place *kerav1.Cursor, head uint32) {
	for place.Position < head {
		end := &kerav1.Cursor{
			StreamId: place.StreamId, StreamletId: place.StreamletId, Entry: place.Entry,
			GroupId: place.GroupId, SegmentId: place.SegmentId, Position: head,
		}
		answer, err := at.reads.call(d.ctx, &kerav1.MultiReadChunksRequest{
			Ranges: []*kerav1.ReadRange{{Start: place, End: end}}, BytesMax: 64 << 10,
		})
		must(d.t, err)
		result := answer.Results[0]
		if result.Error != nil || result.LengthBytes == 0 {
			d.t.Fatalf("nothing is read at %v: %v", place, result.Error)
		}
		data := answer.Chunks[:result.LengthBytes]
		place.Position += result.LengthBytes
		for len(data) > 0 {
			header, payload, rest, err := ParseChunk(data)
			must(d.t, err)
			records, err := DecodeRecords(header, payload)
			must(d.t, err)
			for _, record := range records {
				d.values = append(d.values, base64.StdEncoding.EncodeToString(record.Value))
			}
			data = rest
		}
	}
}
