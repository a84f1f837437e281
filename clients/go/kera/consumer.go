package kera

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	kerav1 "kera.example/client/kera/v1"
)

// ConsumerConfig says how a stream is read. Zero values have defaults.
type ConsumerConfig struct {
	// From is where to go on, as Positions of a Consumer has said. Nil: with the oldest records.
	From *Positions
	// Skip goes on behind records that are lost, such as by retention, and chunks that cannot be read, after OnSkip was told
	// of them; else Poll fails there.
	Skip bool
	// OnSkip is called by who calls Poll, with each such error. Nil: nobody is told.
	OnSkip func(error)
	// BytesMax bounds an answer of a broker; 2 MiB.
	BytesMax uint32
	// Wait is how long a broker may wait for records before it answers that there are none; half a second.
	Wait time.Duration
}

// Batch is the records of a chunk.
type Batch struct {
	StreamletID uint32
	Entry       uint32
	// FirstRecord is the ordinal of the first record within its entry; those of the others follow.
	FirstRecord uint64
	Records     []Record
}

// rangesAtOnce is how many ranges a request names.
const rangesAtOnce = 1000

// Consumer reads all of a stream: each record once, those of an entry in their order, and so those of a key from a
// producer. It is for one goroutine.
type Consumer struct {
	client *Client
	view   *view
	config ConsumerConfig

	byID    map[entryID]*readRange
	ranges  []*readRange // those that were asked for the longest time ago come first
	answers chan *answer
	asked   map[uint32]bool // brokers that have a request
	ready   []*fetched

	done    context.Context
	stop    context.CancelFunc
	running sync.WaitGroup
}

// entryID names an entry of a streamlet.
type entryID struct{ streamlet, entry uint32 }

// readRange is an entry of a streamlet, and how far it was read.
type readRange struct {
	streamlet, entry uint32

	place   Place // behind what Poll has returned, and where to ask
	pending bool  // asked for, or not all that came has been returned
	pause   pauses
	notTill time.Time
}

// fetched is what has come of a range, and Poll has yet to return.
type fetched struct {
	of     *readRange
	chunks []byte
	next   Place
	// begins is where in its segment the first of chunks is, if that is not the one of the range's place.
	begins  uint32
	failure error
}

// answer is that of a broker to a request.
type answer struct {
	brokerID uint32
	asked    []*readRange
	response *kerav1.MultiReadChunksResponse
	err      error
	lost     error // nobody says where anything is, or the stream is gone
}

// NewConsumer opens a stream, which has to have the default schema, for reading.
func (c *Client) NewConsumer(ctx context.Context, stream string, config ConsumerConfig) (*Consumer, error) {
	v, err := c.openView(ctx, stream)
	if err != nil {
		return nil, err
	}
	l := v.now()
	if config.BytesMax == 0 {
		config.BytesMax = 2 << 20
	}
	if config.Wait <= 0 {
		config.Wait = 500 * time.Millisecond
	}
	done, stop := context.WithCancel(context.Background())
	consumer := &Consumer{
		client: c, view: v, config: config,
		byID: map[entryID]*readRange{}, answers: make(chan *answer), asked: map[uint32]bool{},
		done: done, stop: stop,
	}
	for streamlet := range l.stream.GetConfig().GetStreamlets() {
		for entry := range l.stream.GetConfig().GetEntries() {
			one := &readRange{streamlet: streamlet, entry: entry}
			consumer.ranges = append(consumer.ranges, one)
			consumer.byID[entryID{streamlet, entry}] = one
		}
	}
	if config.From != nil {
		if err := consumer.goTo(config.From); err != nil {
			stop()
			return nil, err
		}
	}
	return consumer, nil
}

// goTo begins where positions say.
func (c *Consumer) goTo(positions *Positions) error {
	if positions.StreamID != c.view.streamID {
		return &Error{Code: codeInvalidArgument, Message: fmt.Sprintf(
			"these positions are of stream %d, and %q is %d: it was deleted and created again, or is another one",
			positions.StreamID, c.view.name, c.view.streamID,
		)}
	}
	for _, place := range positions.Places {
		of := c.byID[entryID{place.StreamletID, place.Entry}]
		if of == nil {
			return &Error{Code: codeInvalidArgument, Message: fmt.Sprintf(
				"there is no entry %d of streamlet %d in stream %q", place.Entry, place.StreamletID, c.view.name,
			)}
		}
		of.place = place.Place
	}
	return nil
}

// Poll returns the records of the next chunk, and waits until there is one. Positions count them as read from then on.
func (c *Consumer) Poll(ctx context.Context) (*Batch, error) {
	for {
		if batch, err := c.take(); batch != nil || err != nil {
			return batch, err
		}
		if err := c.done.Err(); err != nil {
			return nil, errors.New("the consumer is closed")
		}
		timer := time.NewTimer(c.ask())
		select {
		case one := <-c.answers:
			timer.Stop()
			if err := c.receive(one); err != nil {
				return nil, err
			}
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		}
	}
}

// take returns the next batch of what has come; nil if there is none.
func (c *Consumer) take() (*Batch, error) {
	for len(c.ready) > 0 {
		first := c.ready[0]
		if first.failure != nil {
			return nil, first.failure // it stays: there is no going on behind it
		}
		if len(first.chunks) == 0 {
			first.of.place, first.of.pending = first.next, false
			c.ready = c.ready[1:]
			continue
		}
		batch, err := c.open(first)
		switch {
		case batch == nil && err == nil: // a punctuation
		case err == nil:
			return batch, nil
		case errors.Is(err, errSkippable) && c.config.Skip:
			c.tell(first.of, err)
		default:
			first.failure = c.failed(first.of, err)
		}
	}
	return nil, nil
}

// errSkippable is a chunk that cannot be read, though it is known where the next one is.
var errSkippable = errors.New("its records cannot be read")

// open takes the first chunk off what has come of a range; nil if it has no records.
func (c *Consumer) open(from *fetched) (*Batch, error) {
	header, payload, rest, err := ParseChunk(from.chunks)
	if err != nil {
		return nil, err
	}
	of := from.of
	if header.StreamID != c.view.streamID || header.StreamletID != of.streamlet || header.Entry != of.entry {
		return nil, corrupt("it is of stream %d, streamlet %d, entry %d", header.StreamID, header.StreamletID, header.Entry)
	}
	var records []Record
	if !header.IsPunctuation() {
		records, err = c.decode(&header, payload)
	}
	if err != nil {
		err = fmt.Errorf("%w: %w", errSkippable, err)
		if !c.config.Skip {
			return nil, err
		}
	}
	if of.place.Group != header.GroupID || of.place.Segment != header.SegmentID {
		of.place = Place{header.GroupID, header.SegmentID, from.begins}
	}
	of.place.Position += uint32(len(from.chunks) - len(rest))
	from.chunks, from.begins = rest, 0
	if err != nil || header.IsPunctuation() {
		return nil, err
	}
	return &Batch{of.streamlet, of.entry, header.FirstRecord, records}, nil
}

func (c *Consumer) decode(header *Header, payload []byte) ([]Record, error) {
	if known, err := c.view.now().schemaID(); err != nil || header.SchemaID != known {
		return nil, corrupt("schema %d is not the default one", header.SchemaID)
	}
	return DecodeRecords(*header, payload)
}

// failed says where something has.
func (c *Consumer) failed(of *readRange, err error) error {
	return fmt.Errorf("stream %q, streamlet %d, entry %d, at %v: %w", c.view.name, of.streamlet, of.entry, of.place, err)
}

func (c *Consumer) tell(of *readRange, err error) {
	if c.config.OnSkip != nil {
		c.config.OnSkip(c.failed(of, err))
	}
}

// ask sends a request to each broker that has ranges which nobody was asked for. It says when to do so again, if no
// answer comes.
func (c *Consumer) ask() (pause time.Duration) {
	pause = time.Second
	where := c.view.now()
	asks, left := map[uint32][]*readRange{}, map[uint32]int{}
	var later []*readRange
	for _, each := range c.ranges {
		if !each.pending {
			broker, wait := where.holder(each.streamlet, each.place.Group), time.Until(each.notTill)
			switch {
			case wait > 0:
				pause = min(pause, wait)
			case c.asked[broker]:
			case len(asks[broker]) == rangesAtOnce:
				left[broker]++
			default:
				asks[broker] = append(asks[broker], each)
				continue
			}
		}
		later = append(later, each)
	}
	for broker, ranges := range asks {
		c.asked[broker] = true
		for _, each := range ranges {
			each.pending = true
		}
		later = append(later, ranges...)
		wait := c.config.Wait
		if left[broker] > 0 { // they are asked for next
			wait /= 10
		}
		c.running.Add(1)
		go c.read(broker, ranges, where, wait)
	}
	c.ranges = later
	return pause
}

// read has a broker answer a request, and looks where everything is when that says that something may be elsewhere.
func (c *Consumer) read(brokerID uint32, ranges []*readRange, where *layout, wait time.Duration) {
	defer c.running.Done()
	one := &answer{brokerID: brokerID, asked: ranges}
	one.response, one.err = c.call(brokerID, ranges, where, wait)
	if one.suggestsAMove() {
		_, one.lost = c.view.newer(c.done, where)
	}
	select {
	case c.answers <- one:
	case <-c.done.Done():
	}
}

func (a *answer) suggestsAMove() bool {
	if a.err != nil {
		return elsewhere(a.err)
	}
	for i, result := range a.response.GetResults() {
		if err := errorOf(result.GetError()); err != nil && elsewhere(err) {
			return true
		}
		// An interval ends here: what follows may be at another broker, in an interval that the layout does not have.
		if result.GetLengthBytes() == 0 && result.GetNext().GetGroupId() != a.asked[i].place.Group {
			return true
		}
	}
	return false
}

// elsewhere says whether an error is none that stays.
func elsewhere(err error) bool {
	return CodeOf(err) == codeUnknownStream || temporary(err)
}

func (c *Consumer) call(
	brokerID uint32, ranges []*readRange, where *layout, wait time.Duration,
) (*kerav1.MultiReadChunksResponse, error) {
	broker, err := c.client.reach(where, brokerID)
	if err != nil {
		return nil, err
	}
	request := &kerav1.MultiReadChunksRequest{
		BytesMax: c.config.BytesMax,
		WaitMs:   uint32(wait.Milliseconds()),
	}
	for _, each := range ranges {
		request.Ranges = append(request.Ranges, &kerav1.ReadRange{Start: each.cursor(c.view.streamID)})
	}
	ctx, cancel := context.WithTimeout(c.done, wait+c.client.config.RequestTimeout)
	defer cancel()
	response, err := broker.reads.call(ctx, request)
	if err != nil {
		return nil, asUnavailable(err)
	}
	if err := errorOf(response.GetError()); err != nil {
		return nil, err
	}
	if got := len(response.GetResults()); got != len(ranges) {
		return nil, &Error{Code: codeInternal, Message: fmt.Sprintf("%d ranges were answered by %d results", len(ranges), got)}
	}
	return response, nil
}

// receive notes what a broker has answered.
func (c *Consumer) receive(one *answer) error {
	delete(c.asked, one.brokerID)
	if one.err != nil {
		for _, each := range one.asked {
			each.later(one.err)
		}
		if elsewhere(one.err) {
			return one.lost
		}
		return one.err
	}
	chunks := one.response.GetChunks()
	for i, result := range one.response.GetResults() {
		of := one.asked[i]
		if err := errorOf(result.GetError()); err != nil {
			if elsewhere(err) {
				of.later(err)
			} else {
				c.ready = append(c.ready, c.behind(of, err))
			}
			continue
		}
		size := int(result.GetLengthBytes())
		if size > len(chunks) {
			return c.failed(of, corrupt("an answer says that it has %d bytes more than it has", size-len(chunks)))
		}
		of.pause = pauses{}
		c.ready = append(c.ready, &fetched{
			of: of, chunks: chunks[:size:size], next: placeOf(result.GetNext()), begins: result.GetBeginsAt(),
		})
		chunks = chunks[size:]
	}
	return one.lost
}

// behind is where to go on after an error that stays: only records that are lost have a place behind them.
func (c *Consumer) behind(of *readRange, err error) *fetched {
	var known *Error
	var available [3]uint64
	if !c.config.Skip || CodeOf(err) != codeDataLost || !errors.As(err, &known) ||
		!known.Attribute("available_from", &available) {
		return &fetched{of: of, failure: c.failed(of, err)}
	}
	c.tell(of, err)
	return &fetched{of: of, next: Place{available[0], uint32(available[1]), uint32(available[2])}}
}

// later has a range asked for again after a pause.
func (r *readRange) later(err error) {
	r.pending = false
	r.notTill = time.Now().Add(r.pause.take(CodeOf(err)))
}

func (r *readRange) cursor(streamID uint64) *kerav1.Cursor {
	return &kerav1.Cursor{
		StreamId: streamID, StreamletId: r.streamlet, Entry: r.entry,
		GroupId: r.place.Group, SegmentId: r.place.Segment, Position: r.place.Position,
	}
}

// Positions says how far all of the stream was read: behind what Poll has returned.
func (c *Consumer) Positions() *Positions {
	all := &Positions{Stream: c.view.name, StreamID: c.view.streamID}
	for _, each := range c.byID {
		all.Places = append(all.Places, EntryPlace{each.streamlet, each.entry, each.place})
	}
	slices.SortFunc(all.Places, func(one, two EntryPlace) int {
		return cmp.Or(cmp.Compare(one.StreamletID, two.StreamletID), cmp.Compare(one.Entry, two.Entry))
	})
	return all
}

// Close ends the consumer.
func (c *Consumer) Close() {
	c.stop()
	c.running.Wait()
}
