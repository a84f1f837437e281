package kera

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	kerav1 "kera.example/client/kera/v1"
)

// ProducerConfig says how records become chunks. Zero values have defaults.
type ProducerConfig struct {
	// Name of a named producer, of which this is the latest instance: earlier ones are fenced off. Empty: none.
	Name string
	// BufferBytes is how much may wait for its acknowledgement before Send does; 32 MiB.
	BufferBytes int
	// ChunkBytes closes a chunk; 256 KiB.
	ChunkBytes int
	// DeliveryTimeout is how long records may take until they are stored; the client's RetryTimeout. Then the producer has
	// failed: what was sent since may be stored or not.
	DeliveryTimeout time.Duration
}

const (
	requestBytes  = 1 << 20
	requestChunks = 64
	chunkRecords  = 10_000
	keylessInARow = 500
)

var errProducerClosed = errors.New("the producer is closed")

// Producer writes records to a stream, each once, those of a key in the order in which they are sent. Its methods may be
// called by several goroutines.
type Producer struct {
	client *Client
	view   *view
	config ProducerConfig

	id       uint64
	schemaID uint32
	codec    uint32
	lanes    []*lane
	done     context.Context
	fail     context.CancelCauseFunc
	running  sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	bytes   int           // not acknowledged
	count   int           // likewise, records
	acked   uint64        // records
	freed   chan struct{} // closed and made anew when something was acknowledged
	keyless int           // records without a key that were sent
}

// NewProducer opens a stream, which has to have the default schema, for writing.
func (c *Client) NewProducer(ctx context.Context, stream string, config ProducerConfig) (*Producer, error) {
	v, err := c.openView(ctx, stream)
	if err != nil {
		return nil, err
	}
	l := v.now()
	schemaID, err := l.schemaID()
	if err != nil {
		return nil, err
	}
	given, err := askCoordinator(
		ctx, c, kerav1.CoordinatorClient.InitProducer, &kerav1.InitProducerRequest{Name: config.Name},
	)
	if err != nil {
		return nil, fmt.Errorf("no id for a producer: %w", err)
	}
	if config.BufferBytes <= 0 {
		config.BufferBytes = 32 << 20
	}
	if config.ChunkBytes <= 0 {
		config.ChunkBytes = 256 << 10
	}
	if config.DeliveryTimeout <= 0 {
		config.DeliveryTimeout = c.config.RetryTimeout
	}
	config.ChunkBytes = min(config.ChunkBytes, roomFor(l))
	done, fail := context.WithCancelCause(context.Background())
	p := &Producer{
		client: c, view: v, config: config,
		id: given.GetProducerId(), schemaID: schemaID,
		codec: uint32(l.stream.GetConfig().GetCodec()),
		done:  done, fail: fail,
		freed: make(chan struct{}),
	}
	for number := range l.stream.GetConfig().GetStreamlets() {
		p.lanes = append(p.lanes, &lane{producer: p, streamlet: number, epoch: given.GetProducerEpoch()})
	}
	p.keyless = rand.IntN(len(p.lanes)) * keylessInARow
	return p, nil
}

// Send takes a record; it is stored when Flush or Close return without an error. It waits while the buffer is full. An
// error of the record itself (too large) leaves the producer as it was; all others are final.
func (p *Producer) Send(ctx context.Context, record Record) error {
	if err := record.check(); err != nil {
		return err
	}
	size := record.size()
	if limit := min(roomFor(p.view.now()), p.config.BufferBytes); size > limit {
		return &Error{
			Code:    codeRecordTooLarge,
			Message: fmt.Sprintf("a record of %d bytes does not fit into %d", size, limit),
		}
	}
	record = record.copied()
	if record.Time.IsZero() {
		record.Time = time.Now()
	}
	for {
		freed, err := p.accept(record, size)
		if freed == nil || err != nil {
			return err
		}
		select {
		case <-freed:
		case <-p.done.Done():
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// accept takes a record if there is room for it; else it returns what is closed when there may be some.
func (p *Producer) accept(record Record, size int) (freed chan struct{}, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errProducerClosed
	}
	if err := context.Cause(p.done); err != nil {
		return nil, err
	}
	if p.bytes+size > p.config.BufferBytes {
		return p.freed, nil
	}
	p.bytes += size
	p.count++
	p.laneOf(&record).add(record, size)
	return nil, nil
}

// roomFor is how many bytes records may have in a chunk.
func roomFor(l *layout) int {
	return l.chunkBytesMax() - headerBytes - alignment
}

// laneOf is where a record goes: by its key, or to each lane in turn, some at a time so that chunks are not tiny.
func (p *Producer) laneOf(record *Record) *lane {
	if key, ok := record.PrimaryKey(); ok {
		return p.lanes[StreamletOf(key, uint32(len(p.lanes)))]
	}
	p.keyless++
	return p.lanes[p.keyless/keylessInARow%len(p.lanes)]
}

// Flush waits until all that was sent is stored. When it fails with ctx's error, the rest is still under way.
func (p *Producer) Flush(ctx context.Context) error {
	for {
		p.mu.Lock()
		left, freed := p.count, p.freed
		p.mu.Unlock()
		if left == 0 {
			return nil
		}
		if err := context.Cause(p.done); err != nil {
			return err
		}
		select {
		case <-freed:
		case <-p.done.Done():
		case <-ctx.Done():
			return fmt.Errorf("%d records may or may not be stored: %w", left, ctx.Err())
		}
	}
}

// Acknowledged says how many records are stored.
func (p *Producer) Acknowledged() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.acked
}

// Close flushes and ends the producer, whether or not that succeeds.
func (p *Producer) Close(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	err := p.Flush(ctx)
	p.fail(errProducerClosed)
	p.running.Wait()
	return err
}

// stored counts a chunk that was acknowledged.
func (p *Producer) stored(one *chunk) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bytes -= one.recordBytes
	p.count -= one.records
	p.acked += uint64(one.records)
	close(p.freed)
	p.freed = make(chan struct{})
}
