// Command kera-produce writes the lines of its standard input to a stream of KerA, as records.
//
// What is before the first tab of a line is the key; without a tab there is none. It ends well when all of them are
// stored, and says how many are when they are not.
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"kera.example/client/internal/flags"
	"kera.example/client/kera"
)

const lineBytesMax = 16 << 20

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "kera-produce: error: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	cluster := flags.Add()
	stream := flag.String("stream", "", "`name` of the stream")
	name := flag.String("name", "", "`name` of a named producer")
	flag.Parse()
	if *stream == "" || flag.NArg() > 0 {
		return errors.New("usage: kera-produce -stream NAME [-bootstrap HOST:PORT] <lines")
	}
	config, err := cluster.Config()
	if err != nil {
		return err
	}
	client, err := kera.Connect(ctx, config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	producer, err := client.NewProducer(ctx, *stream, kera.ProducerConfig{Name: *name})
	if err != nil {
		return err
	}
	err = send(ctx, producer, os.Stdin)
	// What was taken is stored also when it was interrupted; a second signal ends that, too.
	stop := context.AfterFunc(ctx, func() { signal.Reset(os.Interrupt, syscall.SIGTERM) })
	defer stop()
	err = errors.Join(err, producer.Close(context.WithoutCancel(ctx)))
	fmt.Fprintf(os.Stderr, "kera-produce: %d records are stored\n", producer.Acknowledged())
	return err
}

// send sends all lines. Reading them cannot be interrupted, so it has a goroutine of its own, which ends with the input
// or the process.
func send(ctx context.Context, producer *kera.Producer, input io.Reader) error {
	lines, failed := make(chan []byte), make(chan error, 1)
	go func() {
		defer close(lines)
		scanner := bufio.NewScanner(input)
		scanner.Buffer(nil, lineBytesMax)
		for scanner.Scan() {
			select {
			case lines <- bytes.Clone(scanner.Bytes()):
			case <-ctx.Done():
				return
			}
		}
		failed <- scanner.Err()
	}()
	for number := 1; ; number++ {
		var line []byte
		var more bool
		select {
		case line, more = <-lines:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		if !more {
			return <-failed
		}
		record := kera.Record{Value: line}
		if key, value, found := bytes.Cut(line, []byte{'\t'}); found {
			record.Keys, record.Value = [][]byte{key}, value
		}
		if err := producer.Send(ctx, record); err != nil {
			return fmt.Errorf("line %d: %w", number, err)
		}
	}
}
