package kera

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	kerav1 "kera.example/client/kera/v1"
)

// messageBytesMax is the largest message of either direction.
const messageBytesMax = 37 << 20

// peer is a daemon: calls, and one stream of requests each for writes and reads.
type peer struct {
	connection  *grpc.ClientConn
	coordinator kerav1.CoordinatorClient
	broker      kerav1.BrokerClient
	writes      *bulk[kerav1.MultiWriteChunksRequest, kerav1.MultiWriteChunksResponse]
	reads       *bulk[kerav1.MultiReadChunksRequest, kerav1.MultiReadChunksResponse]
}

func newPeer(address string, config *Config) (*peer, error) {
	transport := insecure.NewCredentials()
	if config.TLS != nil {
		transport = credentials.NewTLS(config.TLS)
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(messageBytesMax), grpc.MaxCallSendMsgSize(messageBytesMax),
		),
		// gRPC for Go asks no more often than this.
		grpc.WithKeepaliveParams(
			keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true},
		),
		// Brokers come back at once or move: the default of up to two minutes would be far too long.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: 3 * time.Second,
		}),
	}
	if config.Token != "" {
		options = append(options, grpc.WithPerRPCCredentials(bearer(config.Token)))
	}
	connection, err := grpc.NewClient("passthrough:///"+address, options...)
	if err != nil {
		return nil, err
	}
	p := &peer{
		connection:  connection,
		coordinator: kerav1.NewCoordinatorClient(connection),
		broker:      kerav1.NewBrokerClient(connection),
	}
	p.writes = &bulk[kerav1.MultiWriteChunksRequest, kerav1.MultiWriteChunksResponse]{
		open:  p.broker.MultiWriteChunks,
		setID: func(request *kerav1.MultiWriteChunksRequest, id uint64) { request.RequestId = id },
		idOf:  (*kerav1.MultiWriteChunksResponse).GetRequestId,
	}
	p.reads = &bulk[kerav1.MultiReadChunksRequest, kerav1.MultiReadChunksResponse]{
		open:  p.broker.MultiReadChunks,
		setID: func(request *kerav1.MultiReadChunksRequest, id uint64) { request.RequestId = id },
		idOf:  (*kerav1.MultiReadChunksResponse).GetRequestId,
	}
	return p, nil
}

func (p *peer) close() error {
	p.writes.close()
	p.reads.close()
	return p.connection.Close()
}

// bearer is a token, as each call shows it.
type bearer string

// GetRequestMetadata has the token.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

// RequireTransportSecurity keeps the token off open connections.
func (b bearer) RequireTransportSecurity() bool { return true }

// bulk keeps one stream of requests open, over which many are under way at once; after an error it opens another one.
type bulk[Request, Response any] struct {
	open  func(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[Request, Response], error)
	setID func(*Request, uint64)
	idOf  func(*Response) uint64

	mu     sync.Mutex
	live   *exchange[Request, Response]
	closed bool
}

// exchange is one such stream while it lasts.
type exchange[Request, Response any] struct {
	stop    context.CancelFunc
	sending chan struct{}
	ready   chan struct{} // closed when the stream is open, or could not be opened: then there is none, and err
	done    chan struct{} // closed when it has ended, with err
	stream  grpc.BidiStreamingClient[Request, Response]

	mu      sync.Mutex
	lastID  uint64
	waiting map[uint64]chan *Response
	err     error
}

// call sends a request and waits for its answer. When ctx ends before that, so does the stream: nobody knows what has
// become of the request, and one that follows it on another stream may come first.
func (b *bulk[Request, Response]) call(ctx context.Context, request *Request) (*Response, error) {
	e, err := b.exchange()
	if err != nil {
		return nil, err
	}
	select {
	case <-e.ready:
		if e.stream == nil {
			return nil, e.err
		}
	case <-ctx.Done():
		e.stop()
		return nil, ctx.Err()
	}
	id, answer := e.expect()
	defer e.forget(id)
	b.setID(request, id)
	select {
	case e.sending <- struct{}{}:
	case <-e.done:
		return nil, e.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	unblock := context.AfterFunc(ctx, e.stop)
	err = e.stream.Send(request)
	unblock()
	<-e.sending
	if err != nil { // why is what receiving says
		e.stop()
	}
	select {
	case response := <-answer:
		return response, nil
	case <-e.done:
		return nil, e.err
	case <-ctx.Done():
		e.stop()
		return nil, ctx.Err()
	}
}

func (b *bulk[Request, Response]) exchange() (*exchange[Request, Response], error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, errors.New("the client is closed")
	}
	if b.live != nil {
		select {
		case <-b.live.done:
		default:
			return b.live, nil
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	b.live = &exchange[Request, Response]{
		stop:    stop,
		sending: make(chan struct{}, 1),
		ready:   make(chan struct{}),
		done:    make(chan struct{}),
		waiting: map[uint64]chan *Response{},
	}
	go b.live.run(ctx, b.open, b.idOf)
	return b.live, nil
}

func (b *bulk[Request, Response]) close() {
	b.mu.Lock()
	b.closed = true
	live := b.live
	b.mu.Unlock()
	if live != nil {
		live.stop()
		<-live.done
	}
}

// run opens the stream and hands answers to those who wait for them, until it ends.
func (e *exchange[Request, Response]) run(
	ctx context.Context,
	open func(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[Request, Response], error),
	idOf func(*Response) uint64,
) {
	defer e.stop()
	stream, err := open(ctx)
	if err != nil {
		e.err = errorOfCall(err, nil)
		close(e.done)
		close(e.ready)
		return
	}
	e.stream = stream
	close(e.ready)
	for {
		response, err := stream.Recv()
		if err != nil {
			e.err = ended(err, stream)
			close(e.done)
			return
		}
		e.mu.Lock()
		answer := e.waiting[idOf(response)]
		delete(e.waiting, idOf(response))
		e.mu.Unlock()
		if answer != nil {
			answer <- response // has room for it
		}
	}
}

// ended says why a stream has: it is not known what has become of the requests that are not answered.
func ended(err error, stream grpc.ClientStream) error {
	if errors.Is(err, io.EOF) {
		return &Error{Code: codeUnavailable, Message: "the broker has ended the stream", Retriable: true}
	}
	return errorOfCall(err, stream.Trailer())
}

func (e *exchange[Request, Response]) expect() (id uint64, answer chan *Response) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lastID++
	answer = make(chan *Response, 1)
	e.waiting[e.lastID] = answer
	return e.lastID, answer
}

func (e *exchange[Request, Response]) forget(id uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.waiting, id)
}

// pauses are those between attempts: they grow, from milliseconds after a move.
type pauses struct {
	next time.Duration
}

const (
	pauseAfterMove = 5 * time.Millisecond
	pauseFirst     = 50 * time.Millisecond
	pauseMax       = time.Second
)

// take is the next pause.
func (b *pauses) take(code string) time.Duration {
	if b.next == 0 {
		b.next = pauseFirst
		if code == codeNotOwner {
			b.next = pauseAfterMove
		}
	}
	pause := b.next
	b.next = min(2*b.next, pauseMax)
	return pause/2 + rand.N(pause/2)
}

// wait pauses, or fails as ctx is done.
func (b *pauses) wait(ctx context.Context, code string) error {
	timer := time.NewTimer(b.take(code))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
