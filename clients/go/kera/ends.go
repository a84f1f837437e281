package kera

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	kerav1 "kera.example/client/kera/v1"
)

// Ends asks the owners of all streamlets where the stream ends now. Only an owner knows.
func (c *Consumer) Ends(ctx context.Context) (*Positions, error) {
	ctx, cancel := context.WithTimeout(ctx, c.client.config.RetryTimeout)
	defer cancel()
	ends := &Positions{Stream: c.view.name, StreamID: c.view.streamID}
	where := c.view.now()
	var pause pauses
	for streamlet := uint32(0); streamlet < where.stream.GetConfig().GetStreamlets(); {
		places, err := c.endsOf(ctx, where, streamlet)
		if err == nil {
			ends.Places = append(ends.Places, places...)
			streamlet++
			continue
		}
		if CodeOf(err) != codeUnknownStream && !temporary(err) {
			return nil, err
		}
		if pause.wait(ctx, CodeOf(err)) != nil {
			return nil, fmt.Errorf("where streamlet %d ends: %w", streamlet, err)
		}
		newer, err := c.view.newer(ctx, where)
		if err != nil {
			return nil, err
		}
		where = newer
	}
	return ends, nil
}

func (c *Consumer) endsOf(ctx context.Context, where *layout, streamlet uint32) ([]EntryPlace, error) {
	ctx, cancel := context.WithTimeout(ctx, c.client.config.RequestTimeout)
	defer cancel()
	owner, err := c.client.reach(where, where.owner(streamlet))
	if err != nil {
		return nil, err
	}
	var trailer metadata.MD
	request := &kerav1.DescribeStreamletsRequest{StreamId: c.view.streamID, StreamletIds: []uint32{streamlet}}
	response, err := owner.broker.DescribeStreamlets(ctx, request, grpc.Trailer(&trailer))
	if err != nil {
		return nil, asUnavailable(errorOfCall(err, trailer))
	}
	for _, each := range response.GetStreamlets() {
		if each.GetStreamletId() != streamlet || (each.Owned != nil && !each.GetOwned()) {
			continue
		}
		var places []EntryPlace
		for entry, info := range each.GetEntries() {
			places = append(places, EntryPlace{streamlet, uint32(entry), placeOf(info.GetEnd())})
		}
		return places, nil
	}
	return nil, &Error{Code: codeNotOwner, Message: fmt.Sprintf("streamlet %d has another owner", streamlet)}
}

// Reached says whether all before these ends was returned by Poll.
func (c *Consumer) Reached(ends *Positions) bool {
	for _, end := range ends.Places {
		if of := c.byID[entryID{end.StreamletID, end.Entry}]; of != nil && of.place.before(end.Place) {
			return false
		}
	}
	return true
}

func (p Place) before(other Place) bool {
	if p.Group != other.Group {
		return p.Group < other.Group
	}
	if p.Segment != other.Segment {
		return p.Segment < other.Segment
	}
	return p.Position < other.Position
}
