package kera

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	kerav1 "kera.example/client/kera/v1"
)

// send has so many numbered records stored.
func send(t *testing.T, client *Client, from, to int) {
	t.Helper()
	producer, err := client.NewProducer(context.Background(), "s", ProducerConfig{ChunkBytes: 200})
	if err != nil {
		t.Fatal(err)
	}
	for number := from; number < to; number++ {
		if err := producer.Send(context.Background(), Record{Value: fmt.Append(nil, number)}); err != nil {
			t.Fatal(err)
		}
	}
	if err := producer.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got := producer.Acknowledged(); got != uint64(to-from) {
		t.Errorf("%d records are acknowledged, of %d", got, to-from)
	}
}

// read has so many records, as they come.
func read(t *testing.T, consumer *Consumer, count int) (values []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for len(values) < count {
		batch, err := consumer.Poll(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, record := range batch.Records {
			values = append(values, string(record.Value))
		}
	}
	return values
}

func consume(t *testing.T, client *Client, config ConsumerConfig) *Consumer {
	t.Helper()
	consumer, err := client.NewConsumer(context.Background(), "s", config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(consumer.Close)
	return consumer
}

func numbers(from, to int) (all []string) {
	for number := from; number < to; number++ {
		all = append(all, fmt.Sprint(number))
	}
	return all
}

func TestRecordsAreStoredOnceWhateverBecomesOfRequests(t *testing.T) {
	say := func(code string) *kerav1.Error { return &kerav1.Error{Code: code, Message: code} }
	for name, writing := range map[string]func(request int) (*kerav1.Error, bool, bool){
		"the answer is lost":                func(n int) (*kerav1.Error, bool, bool) { return nil, true, n == 3 || n == 5 },
		"the request is lost":               func(n int) (*kerav1.Error, bool, bool) { return nil, n != 3 && n != 5, n == 3 || n == 5 },
		"it is stored, and not as promised": func(n int) (*kerav1.Error, bool, bool) { return pick(n == 2, say("not_replicated")), true, false },
		"it has moved":                      func(n int) (*kerav1.Error, bool, bool) { return pick(n == 2, say(codeNotOwner)), n != 2, false },
		"there is no room":                  func(n int) (*kerav1.Error, bool, bool) { return pick(n < 4, say("arena_full")), n >= 4, false },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.writing = func(request int, _ Header) (*kerav1.Error, bool, bool) { return writing(request) }
			client := f.connect(t)
			send(t, client, 0, 30)
			if got := read(t, consume(t, client, ConsumerConfig{}), 30); !slices.Equal(got, numbers(0, 30)) {
				t.Errorf("read %v", got)
			}
		})
	}
}

func pick(condition bool, message *kerav1.Error) *kerav1.Error {
	if condition {
		return message
	}
	return nil
}

func TestAProducerThatWasForgottenGoesOnInAnotherEpoch(t *testing.T) {
	f := newFake(t)
	f.writing = func(request int, header Header) (*kerav1.Error, bool, bool) {
		if request == 3 { // as a broker that has lost its memory
			f.next = map[producerEpoch]uint64{}
		}
		return nil, true, false
	}
	client := f.connect(t)
	send(t, client, 0, 30)
	if got := read(t, consume(t, client, ConsumerConfig{}), 30); !slices.Equal(got, numbers(0, 30)) {
		t.Errorf("read %v", got)
	}
	if len(f.next) != 1 || f.next[producerEpoch{1, 4}] == 0 {
		t.Errorf("epochs %v", f.next)
	}
}

func TestAnErrorThatStaysEndsTheProducerAndIsNotTriedAgain(t *testing.T) {
	f := newFake(t)
	f.writing = func(int, Header) (*kerav1.Error, bool, bool) {
		// As the code counts more than what is said.
		return &kerav1.Error{Code: "producer_fenced", Message: "somebody else writes", Retriable: true}, false, false
	}
	producer, err := f.connect(t).NewProducer(context.Background(), "s", ProducerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if err := producer.Send(context.Background(), Record{}); err != nil {
		t.Fatal(err)
	}
	if err := producer.Flush(context.Background()); CodeOf(err) != "producer_fenced" {
		t.Errorf("flushed with %v", err)
	}
	if err := producer.Send(context.Background(), Record{}); CodeOf(err) != "producer_fenced" {
		t.Errorf("sent with %v", err)
	}
	if err := producer.Close(context.Background()); CodeOf(err) != "producer_fenced" {
		t.Errorf("closed with %v", err)
	}
	if f.written != 1 {
		t.Errorf("%d requests", f.written)
	}
}

func TestWhatIsNotStoredInTimeEndsTheProducerWithTheReason(t *testing.T) {
	f := newFake(t)
	f.writing = func(int, Header) (*kerav1.Error, bool, bool) {
		return &kerav1.Error{Code: "too_few_backups", Message: "1 of 2 backups are there"}, false, false
	}
	producer, err := f.connect(t).NewProducer(context.Background(), "s", ProducerConfig{DeliveryTimeout: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if err := producer.Send(context.Background(), Record{}); err != nil {
		t.Fatal(err)
	}
	if err := producer.Close(context.Background()); CodeOf(err) != "too_few_backups" || !strings.Contains(err.Error(), "100ms") {
		t.Errorf("closed with %v", err)
	}
}

func TestSendWaitsWhileTheBufferIsFull(t *testing.T) {
	f := newFake(t)
	gate := make(chan struct{})
	f.writing = func(int, Header) (*kerav1.Error, bool, bool) {
		<-gate
		return nil, true, false
	}
	producer, err := f.connect(t).NewProducer(context.Background(), "s", ProducerConfig{BufferBytes: 10 << 10})
	if err != nil {
		t.Fatal(err)
	}
	value := make([]byte, 6<<10)
	if err := producer.Send(context.Background(), Record{Value: value}); err != nil {
		t.Fatal(err)
	}
	soon, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := producer.Send(soon, Record{Value: value}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("sent with %v", err)
	}
	if err := producer.Send(context.Background(), Record{Value: make([]byte, 11<<10)}); CodeOf(err) != codeRecordTooLarge {
		t.Errorf("sent what is larger than the buffer with %v", err)
	}
	close(gate)
	if err := producer.Send(context.Background(), Record{Value: value}); err != nil {
		t.Error(err)
	}
	if err := producer.Close(context.Background()); err != nil || producer.Acknowledged() != 2 {
		t.Errorf("closed with %v, %d records", err, producer.Acknowledged())
	}
}

func TestAConsumerGoesOnFromPositionsThatWereSavedAndLoaded(t *testing.T) {
	client := newFake(t).connect(t)
	send(t, client, 0, 30)
	consumer := consume(t, client, ConsumerConfig{})
	path := filepath.Join(t.TempDir(), "positions")
	for at := 0; at < 30; {
		batch, err := consumer.Poll(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		at += len(batch.Records)
		// After each chunk, also in the middle of an answer.
		if err := SaveJSON(path, consumer.Positions()); err != nil {
			t.Fatal(err)
		}
		var positions Positions
		if found, err := LoadJSON(path, &positions); !found || err != nil {
			t.Fatal(found, err)
		}
		if at == 30 {
			send(t, client, 30, 31)
		}
		another := consume(t, client, ConsumerConfig{From: &positions})
		if got := read(t, another, 1); got[0] != fmt.Sprint(at) {
			t.Errorf("after %d comes %v", at, got)
		}
	}
}

func TestDamageInTransitIsNamedAndNothingOfItIsReturned(t *testing.T) {
	f := newFake(t)
	client := f.connect(t)
	send(t, client, 0, 1)
	for name, at := range map[string]int{"header": 20, "placement": 104, "payload": headerBytes + 3} {
		f.reading = func(chunks []byte) []byte {
			chunks[at] ^= 1
			return chunks
		}
		consumer := consume(t, client, ConsumerConfig{Skip: true})
		for range 2 { // it stays
			_, err := consumer.Poll(context.Background())
			if CodeOf(err) != codeCorruptChunk || !strings.Contains(err.Error(), name+"'s checksum") {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	f.reading = func(chunks []byte) []byte { return chunks[:len(chunks)-64] }
	if _, err := consume(t, client, ConsumerConfig{}).Poll(context.Background()); CodeOf(err) != codeCorruptChunk {
		t.Errorf("cut short: %v", err)
	}
}

func TestTheLeaderIsFollowed(t *testing.T) {
	leads, another := newFake(t), newFake(t)
	another.leader = leads.address
	if client := another.connect(t); client.leader != leads.address {
		t.Errorf("asks %s", client.leader)
	}
}

func TestNothingRunsAfterAllIsClosed(t *testing.T) {
	f := newFake(t)
	before := runtime.NumGoroutine()
	client, err := Connect(context.Background(), Config{Coordinators: []string{f.address}})
	if err != nil {
		t.Fatal(err)
	}
	send(t, client, 0, 10)
	consumer, err := client.NewConsumer(context.Background(), "s", ConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	read(t, consumer, 10)
	soon, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if _, err := consumer.Poll(soon); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("polled with %v", err)
	}
	consumer.Close()
	if _, err := consumer.Poll(context.Background()); err == nil {
		t.Error("a closed consumer is polled")
	}
	if err := client.Close(); err != nil {
		t.Error(err)
	}
	if _, err := client.NewProducer(context.Background(), "s", ProducerConfig{}); err == nil {
		t.Error("a closed client makes a producer")
	}
	for end := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			stacks := make([]byte, 1<<16)
			t.Fatalf("%s", stacks[:runtime.Stack(stacks, true)])
		}
	}
}
