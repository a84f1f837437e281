package kera

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	kerav1 "kera.example/client/kera/v1"
)

// fake is a daemon that is coordinator and broker, with one stream of one streamlet in memory. What goes wrong is the
// test's: writing is asked of each request before it is stored.
type fake struct {
	kerav1.UnimplementedCoordinatorServer
	kerav1.UnimplementedBrokerServer

	address string

	mu        sync.Mutex
	segment   []byte // chunks, placed
	next      map[producerEpoch]uint64
	records   uint64
	producers uint64
	described int
	// writing decides on a request: what it is answered with, whether it is stored, and whether the stream ends instead.
	writing func(request int, header Header) (answer *kerav1.Error, stored, hangUp bool)
	// reading changes what readers get.
	reading func(chunks []byte) []byte
	leader  string // not empty: this one does not lead
	written int
}

const fakeStream = 77

type producerEpoch struct {
	producer uint64
	epoch    uint32
}

func newFake(t *testing.T) *fake {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{
		address: listener.Addr().String(),
		next:    map[producerEpoch]uint64{},
		writing: func(int, Header) (*kerav1.Error, bool, bool) { return nil, true, false },
		reading: func(chunks []byte) []byte { return chunks },
	}
	server := grpc.NewServer()
	kerav1.RegisterCoordinatorServer(server, f)
	kerav1.RegisterBrokerServer(server, f)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return f
}

func (f *fake) connect(t *testing.T) *Client {
	t.Helper()
	client, err := Connect(context.Background(), Config{
		Coordinators:   []string{f.address},
		RequestTimeout: 2 * time.Second,
		RetryTimeout:   20 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func (f *fake) DescribeCluster(
	ctx context.Context, _ *kerav1.DescribeClusterRequest,
) (*kerav1.DescribeClusterResponse, error) {
	if f.leader != "" {
		return nil, failing(ctx, &kerav1.Error{
			Code: codeNotLeader, Attributes: map[string]string{"leader": fmt.Sprintf("%q", f.leader)},
		})
	}
	return &kerav1.DescribeClusterResponse{}, nil
}

func failing(ctx context.Context, message *kerav1.Error) error {
	data, err := proto.Marshal(message)
	if err != nil {
		return err
	}
	if err := grpc.SetTrailer(ctx, metadata.Pairs("kera-error-bin", string(data))); err != nil {
		return err
	}
	return status.Error(codes.FailedPrecondition, message.GetCode())
}

func (f *fake) DescribeStream(
	ctx context.Context, request *kerav1.DescribeStreamRequest,
) (*kerav1.DescribeStreamResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.described++
	if request.GetName() != "s" && request.GetStreamId() != fakeStream {
		return nil, failing(ctx, &kerav1.Error{Code: codeUnknownStream, Message: "there is no such stream"})
	}
	return &kerav1.DescribeStreamResponse{
		Stream: &kerav1.StreamInfo{
			StreamId:    fakeStream,
			Name:        "s",
			Config:      &kerav1.StreamConfig{Streamlets: 1, Entries: 1},
			Schemas:     []*kerav1.StreamSchema{{SchemaId: 1}},
			Assignments: []*kerav1.StreamletAssignment{{BrokerId: 1}},
		},
		Brokers: []*kerav1.BrokerInfo{{BrokerId: 1, GrpcAddress: f.address, SegmentBytes: 1 << 20}},
	}, nil
}

func (f *fake) InitProducer(context.Context, *kerav1.InitProducerRequest) (*kerav1.InitProducerResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.producers++
	return &kerav1.InitProducerResponse{ProducerId: f.producers, ProducerEpoch: 3}, nil
}

func (f *fake) MultiWriteChunks(
	stream grpc.BidiStreamingServer[kerav1.MultiWriteChunksRequest, kerav1.MultiWriteChunksResponse],
) error {
	for {
		request, err := stream.Recv()
		if err != nil {
			return nil
		}
		response := &kerav1.MultiWriteChunksResponse{RequestId: request.GetRequestId()}
		for rest := request.GetChunks(); len(rest) > 0; {
			size := headerBytes + paddedBytes(int(binary.LittleEndian.Uint32(rest[8:])))
			said, hangUp := f.write(rest[:size])
			if hangUp {
				return status.Error(codes.Unavailable, "it hangs up")
			}
			response.Statuses = append(response.Statuses, said)
			rest = rest[size:]
		}
		if err := stream.Send(response); err != nil {
			return nil
		}
	}
}

// write stores a chunk as a broker does: once, and in the order of sequences.
func (f *fake) write(data []byte) (said *kerav1.ChunkStatus, hangUp bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	chunk := append([]byte{}, data...)
	le := binary.LittleEndian
	le.PutUint64(chunk[88:], 1)
	le.PutUint32(chunk[96:], 1)
	le.PutUint64(chunk[104:], f.records)
	le.PutUint32(chunk[124:], crc32.Checksum(chunk[placementAt:124], castagnoli))
	header, _, _, err := ParseChunk(chunk)
	if err != nil {
		return &kerav1.ChunkStatus{Error: &kerav1.Error{Code: codeCorruptChunk, Message: err.Error()}}, false
	}
	f.written++
	refusal, stored, hangUp := f.writing(f.written, header)
	said = &kerav1.ChunkStatus{Error: refusal}
	if !stored {
		return said, hangUp
	}
	of := producerEpoch{header.ProducerID, header.ProducerEpoch}
	switch expected := f.next[of]; {
	case header.Sequence < expected:
		said.Duplicate = true
	case header.Sequence > expected:
		said.Error = &kerav1.Error{Code: codeOutOfSequence, Message: fmt.Sprintf("expected %d", expected)}
	default:
		f.next[of]++
		f.segment = append(f.segment, chunk...)
		f.records += uint64(header.RecordCount)
	}
	return said, hangUp
}

func (f *fake) MultiReadChunks(
	stream grpc.BidiStreamingServer[kerav1.MultiReadChunksRequest, kerav1.MultiReadChunksResponse],
) error {
	for {
		request, err := stream.Recv()
		if err != nil {
			return nil
		}
		f.mu.Lock()
		start := request.GetRanges()[0].GetStart()
		chunks := f.reading(append([]byte{}, f.segment[start.GetPosition():]...))
		next := proto.Clone(start).(*kerav1.Cursor)
		next.GroupId, next.SegmentId, next.Position = 1, 1, uint32(len(f.segment))
		f.mu.Unlock()
		if len(chunks) == 0 {
			time.Sleep(time.Duration(min(request.GetWaitMs(), 5)) * time.Millisecond)
		}
		response := &kerav1.MultiReadChunksResponse{
			RequestId: request.GetRequestId(),
			Results:   []*kerav1.ReadResult{{Next: next, LengthBytes: uint32(len(chunks))}},
			Chunks:    chunks,
		}
		if err := stream.Send(response); err != nil {
			return nil
		}
	}
}
