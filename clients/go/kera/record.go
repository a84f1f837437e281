package kera

import (
	"time"
	"unicode/utf8"
)

// Record is one of a stream with the default schema.
type Record struct {
	// Time of the record, to the microsecond; a producer takes the zero time as now.
	Time time.Time
	// Keys begin with the primary key, which decides on the streamlet. Nil: none.
	Keys [][]byte
	// Value of the record. Nil is null, which is something else than no bytes.
	Value []byte
	// Headers in their order; names may repeat.
	Headers []RecordHeader
}

// RecordHeader is a name and a value that go with a record.
type RecordHeader struct {
	Name  string
	Value []byte
}

// PrimaryKey is the first key; ok is false if there is none, or it is null.
func (r *Record) PrimaryKey() (key []byte, ok bool) {
	if len(r.Keys) == 0 || r.Keys[0] == nil {
		return nil, false
	}
	return r.Keys[0], true
}

// size is about what the record takes in a chunk, and never less.
func (r *Record) size() int {
	size := 48 + len(r.Value)
	for _, key := range r.Keys {
		size += 8 + len(key)
	}
	for _, header := range r.Headers {
		size += 16 + len(header.Name) + len(header.Value)
	}
	return size
}

// check refuses what no chunk can have.
func (r *Record) check() error {
	for _, header := range r.Headers {
		if !utf8.ValidString(header.Name) {
			return &Error{Code: codeInvalidArgument, Message: "the name of a header is not UTF-8"}
		}
	}
	return nil
}

// copied is the record with bytes of its own, as the caller may use its buffers again.
func (r *Record) copied() Record {
	one := Record{Time: r.Time, Value: copyOf(r.Value)}
	if r.Keys != nil {
		one.Keys = make([][]byte, len(r.Keys))
		for i, key := range r.Keys {
			one.Keys[i] = copyOf(key)
		}
	}
	if r.Headers != nil {
		one.Headers = make([]RecordHeader, len(r.Headers))
		for i, header := range r.Headers {
			one.Headers[i] = RecordHeader{header.Name, copyOf(header.Value)}
		}
	}
	return one
}

// copyOf keeps nil and empty apart.
func copyOf(data []byte) []byte {
	if data == nil {
		return nil
	}
	return append([]byte{}, data...)
}

// columns are records as the payloads have them. Offsets are of what is within: keys of all records follow each other,
// and so do headers.
type columns struct {
	times       []int64
	keys        []span
	keyItems    [][]byte
	values      [][]byte
	headers     []span
	headerNames [][]byte
	headerItems [][]byte
}

// span is a list of a row: those from start to end. One that is null is nothing, not empty.
type span struct {
	start, end int
	null       bool
}

func (s span) length() int { return s.end - s.start }

func columnsOf(records []Record) *columns {
	c := &columns{}
	for _, record := range records {
		c.times = append(c.times, record.Time.UnixMicro())
		start := len(c.keyItems)
		c.keyItems = append(c.keyItems, record.Keys...)
		c.keys = append(c.keys, span{start, len(c.keyItems), record.Keys == nil})
		c.values = append(c.values, record.Value)
		start = len(c.headerNames)
		for _, header := range record.Headers {
			c.headerNames = append(c.headerNames, append([]byte{}, header.Name...))
			c.headerItems = append(c.headerItems, header.Value)
		}
		c.headers = append(c.headers, span{start, len(c.headerNames), record.Headers == nil})
	}
	return c
}

func (c *columns) records() ([]Record, error) {
	for i, name := range c.headerNames { // also those that no record refers to
		if name == nil || !utf8.Valid(name) {
			return nil, corrupt("name %d of its headers is null or not UTF-8", i)
		}
	}
	records := make([]Record, len(c.times))
	for i := range records {
		record := Record{Time: time.UnixMicro(c.times[i]).UTC(), Value: c.values[i]}
		if keys := c.keys[i]; !keys.null {
			record.Keys = c.keyItems[keys.start:keys.end:keys.end]
		}
		if headers := c.headers[i]; !headers.null {
			record.Headers = make([]RecordHeader, 0, headers.length())
			for at := headers.start; at < headers.end; at++ {
				record.Headers = append(record.Headers, RecordHeader{string(c.headerNames[at]), c.headerItems[at]})
			}
		}
		records[i] = record
	}
	return records, nil
}

// DecodedBytesMax bounds what the records of one chunk take in memory, so that no chunk can exhaust it.
const DecodedBytesMax = 512 << 20

// valueBytes is what a value takes beside its bytes: a slice.
const valueBytes = 24

// decodePayload has the records of a chunk that ParseChunk has checked.
func decodePayload(header *Header, payload []byte) ([]Record, error) {
	if int64(header.RecordCount)*3*valueBytes > DecodedBytesMax {
		return nil, corrupt("%d records are too many for %d bytes", header.RecordCount, DecodedBytesMax)
	}
	decode := decodeLean
	if header.Version == versionArrow {
		decode = decodeArrow
	}
	columns, err := decode(payload, int(header.RecordCount), header.Codec)
	if err != nil {
		return nil, err
	}
	return columns.records()
}

// DecodeRecords opens the payload of a chunk with the default schema.
func DecodeRecords(header Header, payload []byte) ([]Record, error) {
	return decodePayload(&header, payload)
}
