// Command kera-consume prints the records of a stream of KerA, one JSON text a line.
//
// With -positions it goes on where the run before has stopped. With -output, too, each record is in that file once, even
// if runs are killed: the positions are saved with the length of the output that belongs to them, and a run begins by
// cutting off what is behind that.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"kera.example/client/internal/flags"
	"kera.example/client/kera"
)

// saved is the file of positions.
type saved struct {
	kera.Positions
	// OutputBytes is how long the output was that has all records before the positions.
	OutputBytes int64 `json:"output_bytes"`
}

// line is how a record is printed: bytes as Base64.
type line struct {
	Streamlet uint32              `json:"streamlet"`
	Entry     uint32              `json:"entry"`
	Ordinal   uint64              `json:"ordinal"`
	TimeUs    int64               `json:"time_us"`
	Keys      [][]byte            `json:"keys"`
	Value     []byte              `json:"value"`
	Headers   []kera.RecordHeader `json:"headers"`
}

type options struct {
	stream, positions, output string
	untilEnd, skip            bool
	saveEvery                 time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintf(os.Stderr, "kera-consume: error: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	var o options
	cluster := flags.Add()
	flag.StringVar(&o.stream, "stream", "", "`name` of the stream")
	flag.StringVar(&o.positions, "positions", "", "`file` that says where to go on; made if it is not there")
	flag.StringVar(&o.output, "output", "", "`file` to append to, instead of standard output")
	flag.BoolVar(&o.untilEnd, "until-end", false, "stop when all is read that there was at the beginning")
	flag.BoolVar(&o.skip, "skip", false, "go on behind records that are lost or cannot be read")
	flag.DurationVar(&o.saveEvery, "save-every", time.Second, "how often positions are saved")
	flag.Parse()
	if o.stream == "" || flag.NArg() > 0 {
		return errors.New("usage: kera-consume -stream NAME [-bootstrap HOST:PORT] [-positions FILE [-output FILE]]")
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
	return consume(ctx, client, &o)
}

func consume(ctx context.Context, client *kera.Client, o *options) (err error) {
	var before saved
	settings := kera.ConsumerConfig{Skip: o.skip, OnSkip: func(err error) {
		fmt.Fprintf(os.Stderr, "kera-consume: skipped: %v\n", err)
	}}
	if o.positions != "" {
		found, err := kera.LoadJSON(o.positions, &before)
		if err != nil {
			return err
		}
		if found {
			settings.From = &before.Positions
		}
	}
	consumer, err := client.NewConsumer(ctx, o.stream, settings)
	if err != nil {
		return err
	}
	defer consumer.Close()
	out, err := openOutput(o, before.OutputBytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.save(consumer), out.file.Close()) }()
	var ends *kera.Positions
	if o.untilEnd {
		if ends, err = consumer.Ends(ctx); err != nil {
			return err
		}
	}
	for ends == nil || !consumer.Reached(ends) {
		if err := out.next(ctx, consumer); err != nil {
			return err
		}
	}
	return nil
}

// output is where records go, and how far it is that belongs to the saved positions.
type output struct {
	file      *os.File
	lines     *bufio.Writer
	positions string
	counted   bool // its length is saved: it is a file of ours
	saveEvery time.Duration
	saved     time.Time
}

func openOutput(o *options, length int64) (*output, error) {
	out := &output{file: os.Stdout, positions: o.positions, saveEvery: o.saveEvery, saved: time.Now()}
	if o.output != "" {
		file, err := os.OpenFile(o.output, os.O_RDWR|os.O_CREATE, 0o644)
		if err != nil {
			return nil, err
		}
		out.file, out.counted = file, o.positions != ""
		if err := out.begin(length); err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", o.output, err), file.Close())
		}
	}
	out.lines = bufio.NewWriterSize(out.file, 1<<16)
	return out, nil
}

// begin cuts off what the run before had written and not saved; without positions it appends.
func (o *output) begin(length int64) error {
	info, err := o.file.Stat()
	if err != nil {
		return err
	}
	if !o.counted {
		length = info.Size()
	}
	if info.Size() < length {
		return fmt.Errorf("it has %d bytes, and had %d when the positions were saved", info.Size(), length)
	}
	if err := o.file.Truncate(length); err != nil {
		return err
	}
	_, err = o.file.Seek(length, 0)
	return err
}

// next prints what comes, and saves when it is time.
func (o *output) next(ctx context.Context, consumer *kera.Consumer) error {
	waiting, cancel := context.WithDeadline(ctx, o.saved.Add(o.saveEvery))
	defer cancel()
	batch, err := consumer.Poll(waiting)
	if err != nil && (ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded)) {
		return err
	}
	if batch != nil {
		if err := o.print(batch); err != nil {
			return err
		}
	}
	if time.Since(o.saved) >= o.saveEvery {
		return o.save(consumer)
	}
	return nil
}

func (o *output) print(batch *kera.Batch) error {
	for i, record := range batch.Records {
		text, err := json.Marshal(line{
			batch.StreamletID, batch.Entry, batch.FirstRecord + uint64(i),
			record.Time.UnixMicro(), record.Keys, record.Value, record.Headers,
		})
		if err != nil {
			return err
		}
		if _, err := o.lines.Write(append(text, '\n')); err != nil {
			return err
		}
	}
	return nil
}

// save has the output written, and then the positions.
func (o *output) save(consumer *kera.Consumer) error {
	o.saved = time.Now()
	if err := o.lines.Flush(); err != nil || o.positions == "" {
		return err
	}
	now := saved{Positions: *consumer.Positions()}
	if o.counted {
		if err := o.file.Sync(); err != nil {
			return err
		}
		length, err := o.file.Seek(0, 1)
		if err != nil {
			return err
		}
		now.OutputBytes = length
	}
	return kera.SaveJSON(o.positions, &now)
}
