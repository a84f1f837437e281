package kera

import (
	"context"
	"fmt"
	"slices"
	"time"

	kerav1 "kera.example/client/kera/v1"
)

// lane takes the records of one streamlet to its owner. One request is under way at a time, so that after any trouble
// it is clear what comes next; records that come meanwhile wait, and make larger chunks.
//
// What waits is guarded by the producer's mutex; the rest belongs to the goroutine that delivers.
type lane struct {
	producer  *Producer
	streamlet uint32

	waiting    []sized
	delivering bool

	epoch    uint32
	sequence uint64
}

// sized is a record with what it takes.
type sized struct {
	record Record
	bytes  int
}

// chunk is one that is not acknowledged yet.
type chunk struct {
	data        []byte
	records     int
	recordBytes int
}

// add has a record delivered. The producer's mutex is held.
func (l *lane) add(record Record, size int) {
	l.waiting = append(l.waiting, sized{record, size})
	if !l.delivering {
		l.delivering = true
		l.producer.running.Add(1)
		go l.run()
	}
}

// run delivers until nothing waits, or the producer has failed.
func (l *lane) run() {
	defer l.producer.running.Done()
	for {
		chunks, err := l.take()
		if err == nil && len(chunks) == 0 {
			return
		}
		if err == nil {
			err = l.deliver(chunks)
		}
		if err != nil {
			l.producer.fail(fmt.Errorf("streamlet %d: %w", l.streamlet, err))
			return
		}
	}
}

// take makes chunks of what waits, as many as a request has; of none the lane is idle from then on.
func (l *lane) take() ([]*chunk, error) {
	var chunks []*chunk
	for _, records := range l.cut() {
		one, err := l.seal(records)
		if err != nil {
			return nil, err
		}
		chunks = append(chunks, one)
	}
	return chunks, nil
}

// cut divides what waits into records of a chunk each.
func (l *lane) cut() [][]sized {
	p := l.producer
	p.mu.Lock()
	defer p.mu.Unlock()
	var all [][]sized
	total := 0
	for len(l.waiting) > 0 && total < requestBytes && len(all) < requestChunks {
		count, bytes := 0, 0
		for _, each := range l.waiting {
			if count > 0 && (bytes+each.bytes > p.config.ChunkBytes || count == chunkRecords) {
				break
			}
			count++
			bytes += each.bytes
		}
		all = append(all, l.waiting[:count:count])
		l.waiting = l.waiting[count:]
		total += bytes
	}
	if len(l.waiting) == 0 {
		l.waiting = nil
	}
	l.delivering = len(all) > 0
	return all
}

// seal makes the next chunk.
func (l *lane) seal(waiting []sized) (*chunk, error) {
	p := l.producer
	one := &chunk{records: len(waiting)}
	records := make([]Record, len(waiting))
	for i, each := range waiting {
		records[i] = each.record
		one.recordBytes += each.bytes
	}
	c := columnsOf(records)
	payload, err := encodeLean(c, p.codec)
	if err != nil {
		return nil, fmt.Errorf("records cannot be compressed: %w", err)
	}
	header := Header{
		Version:       versionLean,
		RecordCount:   uint32(len(records)),
		StreamID:      p.view.streamID,
		StreamletID:   l.streamlet,
		SchemaID:      p.schemaID,
		ProducerID:    p.id,
		ProducerEpoch: l.epoch,
		Codec:         p.codec,
		Sequence:      l.sequence,
		CreatedUs:     time.Now().UnixMicro(),
		MinUs:         slices.Min(c.times),
		MaxUs:         slices.Max(c.times),
	}
	if p.codec != codecNone {
		header.Flags = flagCompressed
	}
	one.data = EncodeChunk(header, payload)
	l.sequence++
	return one, nil
}

// deliver sends chunks until all are stored. Whenever it is not known whether one is, it is sent again as it was, with
// all that come after it.
func (l *lane) deliver(chunks []*chunk) error {
	p := l.producer
	ctx, cancel := context.WithTimeout(p.done, p.config.DeliveryTimeout)
	defer cancel()
	where := p.view.now()
	var pause pauses
	for {
		stored, failure := l.send(ctx, where, chunks)
		for _, each := range chunks[:stored] {
			p.stored(each)
		}
		if chunks = chunks[stored:]; len(chunks) == 0 {
			return nil
		}
		if stored > 0 {
			pause = pauses{}
		}
		code := CodeOf(failure)
		switch {
		case code == codeOutOfSequence && stored == 0:
			// Nothing is missing before the oldest one: the broker has forgotten this producer.
			l.beginEpoch(chunks)
		case code == codeUnknownStream || temporary(failure):
			newer, err := p.view.newer(ctx, where)
			if err != nil {
				return fmt.Errorf("%w, after: %w", err, failure)
			}
			where = newer
		default:
			return failure
		}
		if pause.wait(ctx, code) != nil {
			return fmt.Errorf("not stored within %v: %w", p.config.DeliveryTimeout, failure)
		}
	}
}

// send has the owner store chunks. It says how many are stored, in their order, and what has become of the next one.
func (l *lane) send(ctx context.Context, where *layout, chunks []*chunk) (stored int, failure error) {
	ctx, cancel := context.WithTimeout(ctx, l.producer.client.config.RequestTimeout)
	defer cancel()
	owner, err := l.producer.client.reach(where, where.owner(l.streamlet))
	if err != nil {
		return 0, err
	}
	request := &kerav1.MultiWriteChunksRequest{ChunkCount: uint32(len(chunks))}
	for _, each := range chunks {
		request.Chunks = append(request.Chunks, each.data...)
	}
	response, err := owner.writes.call(ctx, request)
	if err != nil {
		return 0, asUnavailable(err)
	}
	if err := errorOf(response.GetError()); err != nil {
		return 0, err
	}
	if got := len(response.GetStatuses()); got != len(chunks) {
		return 0, &Error{Code: codeInternal, Message: fmt.Sprintf("%d chunks were answered by %d statuses", len(chunks), got)}
	}
	for i, status := range response.GetStatuses() {
		if err := errorOf(status.GetError()); err != nil {
			return i, err
		}
	}
	return len(chunks), nil
}

// beginEpoch gives chunks, which are all that is left, sequences from 0 on in another epoch.
func (l *lane) beginEpoch(chunks []*chunk) {
	l.epoch++
	l.sequence = 0
	for _, each := range chunks {
		renumber(each.data, l.epoch, l.sequence)
		l.sequence++
	}
}
