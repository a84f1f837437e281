package kera

import (
	"encoding/binary"
	"math"
)

// The payload of version 1: an Arrow record batch message, of the default schema's columns. This reads the flatbuffers
// of such a message by hand, each number with its bounds; who needs other schemas takes an Arrow library instead.

// Of the columns as Arrow counts them: nodes of each column and what is within it, and buffers of each node.
const (
	arrowNodes   = 8
	arrowBuffers = 19
)

func decodeArrow(payload []byte, records int, codec uint32) (*columns, error) {
	le := binary.LittleEndian
	if len(payload) < 8 || le.Uint32(payload) != math.MaxUint32 {
		return nil, corrupt("this is not an Arrow message")
	}
	metadataBytes := int64(le.Uint32(payload[4:]))
	if metadataBytes > int64(len(payload)-8) {
		return nil, corrupt("the metadata reach out of the payload")
	}
	f := &flatbuffer{data: payload[8 : 8+metadataBytes]}
	message := f.table(0)
	const recordBatch = 3
	if kind := f.byteAt(f.field(message, 1)); kind != recordBatch && f.err == nil {
		return nil, corrupt("this is an Arrow message of kind %d, and no record batch", kind)
	}
	batch := f.table(f.field(message, 2))
	body := payload[8+metadataBytes:]
	if size := f.int64At(f.field(message, 3)); f.err == nil && (size < 0 || size > int64(len(body))) {
		return nil, corrupt("the body reaches out of the payload")
	}
	if rows := f.int64At(f.field(batch, 0)); f.err == nil && rows != int64(records) {
		return nil, corrupt("the batch has %d rows, the header says %d", rows, records)
	}
	r := &arrowReader{body: body, room: DecodedBytesMax, codec: codec}
	if compressed := f.field(batch, 3) != 0; compressed != (codec != codecNone) {
		return nil, corrupt("compression is not as the header says")
	}
	nodesAt, nodes := f.vector(f.field(batch, 1), 16)
	buffersAt, buffers := f.vector(f.field(batch, 2), 16)
	if f.err != nil {
		return nil, f.err
	}
	if nodes != arrowNodes || buffers != arrowBuffers {
		return nil, corrupt("%d columns and %d buffers are not those of the default schema", nodes, buffers)
	}
	for i := range nodes {
		at := nodesAt + 16*i
		r.nodes = append(r.nodes, [2]int64{int64(le.Uint64(f.data[at:])), int64(le.Uint64(f.data[at+8:]))})
	}
	for i := range buffers {
		at := buffersAt + 16*i
		r.buffers = append(r.buffers, [2]int64{int64(le.Uint64(f.data[at:])), int64(le.Uint64(f.data[at+8:]))})
	}
	c := r.columns(records)
	if r.err != nil {
		return nil, r.err
	}
	return c, nil
}

// flatbuffer reads numbers at places that the data themselves name. The first error stays. Place 0 is none.
type flatbuffer struct {
	data []byte
	err  error
}

func (f *flatbuffer) has(at, bytes int) bool {
	if f.err == nil && (at < 0 || at > len(f.data)-bytes) {
		f.err = corrupt("the metadata of the batch are damaged")
	}
	return f.err == nil
}

func (f *flatbuffer) uint32At(at int) int {
	if !f.has(at, 4) {
		return 0
	}
	return int(binary.LittleEndian.Uint32(f.data[at:]))
}

func (f *flatbuffer) uint16At(at int) int {
	if !f.has(at, 2) {
		return 0
	}
	return int(binary.LittleEndian.Uint16(f.data[at:]))
}

func (f *flatbuffer) byteAt(at int) byte {
	if at == 0 || !f.has(at, 1) {
		return 0
	}
	return f.data[at]
}

func (f *flatbuffer) int64At(at int) int64 {
	if at == 0 || !f.has(at, 8) {
		return 0
	}
	return int64(binary.LittleEndian.Uint64(f.data[at:]))
}

// table is where the table begins that the offset at a place leads to.
func (f *flatbuffer) table(at int) int {
	return at + f.uint32At(at)
}

// field is where field i of a table is; 0: it is absent, and has its default.
func (f *flatbuffer) field(table, i int) int {
	if !f.has(table, 4) {
		return 0
	}
	vtable := table - int(int32(binary.LittleEndian.Uint32(f.data[table:])))
	if size := f.uint16At(vtable); 4+2*i+2 > size {
		return 0
	}
	offset := f.uint16At(vtable + 4 + 2*i)
	if offset == 0 {
		return 0
	}
	return table + offset
}

// vector is where the elements begin, and how many there are.
func (f *flatbuffer) vector(at, elementBytes int) (start, count int) {
	if at == 0 {
		return 0, 0
	}
	start = at + f.uint32At(at)
	count = f.uint32At(start)
	start += 4
	if f.err == nil && (start > len(f.data) || count > (len(f.data)-start)/elementBytes) {
		f.err = corrupt("the metadata of the batch are damaged")
		return 0, 0
	}
	return start, count
}

// arrowReader takes nodes and buffers in their order.
type arrowReader struct {
	body    []byte
	nodes   [][2]int64 // how many values, and how many of them are null
	buffers [][2]int64
	codec   uint32
	room    int
	err     error
}

func (r *arrowReader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = corrupt(format, args...)
	}
}

func (r *arrowReader) columns(records int) *columns {
	c := &columns{times: make([]int64, records)}
	if _, nulls := r.node(records); nulls > 0 {
		r.fail("%d times are null", nulls)
	}
	if times := r.buffer(records, 8); times != nil {
		for i := range c.times {
			c.times[i] = int64(binary.LittleEndian.Uint64(times[8*i:]))
		}
	}
	var items int
	c.keys, items = r.list(records)
	c.keyItems = r.bytes(items)
	c.values = r.bytes(records)
	c.headers, items = r.list(records)
	r.neverNull()
	r.node(items)
	r.neverNull()
	c.headerNames = r.bytes(items)
	c.headerItems = r.bytes(items)
	return c
}

// node takes one that has so many values, with its bits: which of them are there, and how many are not.
func (r *arrowReader) node(values int) (valid func(int) bool, nulls int) {
	length, said := r.nodes[0][0], r.nodes[0][1]
	r.nodes = r.nodes[1:]
	if length != int64(values) {
		r.fail("a column has %d values, where there are %d", length, values)
	}
	if values > r.room/valueBytes {
		r.fail("its values take more than %d bytes", DecodedBytesMax)
	}
	r.room -= values * valueBytes
	if said == 0 { // Arrow does not look at the bits then
		r.buffers = r.buffers[1:]
		return func(int) bool { return true }, 0
	}
	data := r.raw()
	if (values+7)/8 > len(data) {
		r.fail("there are fewer bits than values")
	}
	if r.err != nil {
		return func(int) bool { return false }, 0
	}
	valid = func(i int) bool { return data[i/8]>>(i%8)&1 == 1 }
	for i := range values {
		if !valid(i) {
			nulls++
		}
	}
	const unknown = -1
	if said != unknown && said != int64(nulls) {
		r.fail("%d values are null, and should be %d", nulls, said)
	}
	return valid, nulls
}

// neverNull looks at the next node: entries of a map and their keys have no nulls, and do not leave open how many.
func (r *arrowReader) neverNull() {
	if nulls := r.nodes[0][1]; nulls != 0 {
		r.fail("a map has %d nulls among its entries or keys", nulls)
	}
}

// raw takes a buffer, decompressed.
func (r *arrowReader) raw() []byte {
	at, size := r.buffers[0][0], r.buffers[0][1]
	r.buffers = r.buffers[1:]
	if r.err != nil || at < 0 || size < 0 || at > int64(len(r.body)) || size > int64(len(r.body))-at {
		r.fail("a buffer reaches out of the body")
		return nil
	}
	data := r.body[at : at+size]
	if r.codec == codecNone || len(data) == 0 {
		return data
	}
	if len(data) < 8 {
		r.fail("a compressed buffer does not say its length")
		return nil
	}
	length, data := int64(binary.LittleEndian.Uint64(data)), data[8:]
	if length == -1 {
		return data
	}
	if length < 0 || length > int64(r.room) {
		r.fail("its values take more than %d bytes", DecodedBytesMax)
		return nil
	}
	r.room -= int(length)
	out, err := decompress(r.codec, data, length)
	if err != nil && r.err == nil {
		r.err = err
	}
	return out
}

// buffer takes values of some width; nil if there are not so many, or none.
func (r *arrowReader) buffer(values, width int) []byte {
	data := r.raw()
	if values > len(data)/width {
		r.fail("a buffer has %d bytes, and should have %d values of %d", len(data), values, width)
		return nil
	}
	if values == 0 {
		return nil
	}
	return data
}

// offsets takes where values begin and end; the last is how many are within.
func (r *arrowReader) offsets(values int) []int {
	offsets := make([]int, values+1)
	data := r.raw()
	if values == 0 && len(data) == 0 {
		return offsets
	}
	if values+1 > len(data)/4 {
		r.fail("there are too few offsets for the values")
		return offsets
	}
	last := 0
	for i := range offsets {
		offset := int(int32(binary.LittleEndian.Uint32(data[4*i:])))
		if offset < last {
			r.fail("offsets fall, or are below 0")
			return make([]int, values+1)
		}
		offsets[i], last = offset, offset
	}
	return offsets
}

// list takes lists but for what is within: its rows, and how many values those may refer to.
func (r *arrowReader) list(rows int) ([]span, int) {
	valid, _ := r.node(rows)
	offsets := r.offsets(rows)
	items := r.nodes[0][0]
	if r.err == nil && (items < int64(offsets[rows]) || items > DecodedBytesMax) {
		r.fail("lists have %d values within, and refer to %d", items, offsets[rows])
	}
	if r.err != nil {
		return nil, 0
	}
	spans := make([]span, rows)
	for i := range spans {
		spans[i] = span{offsets[i], offsets[i+1], !valid(i)}
	}
	return spans, int(items)
}

// bytes takes binary values, which are parts of their buffer.
func (r *arrowReader) bytes(count int) [][]byte {
	valid, _ := r.node(count)
	if r.err != nil {
		return nil
	}
	offsets := r.offsets(count)
	data := r.raw()
	if r.err == nil && count > 0 && offsets[count] > len(data) {
		r.fail("offsets reach out of their buffer")
	}
	if r.err != nil {
		return nil
	}
	values := make([][]byte, count)
	for i := range values {
		if valid(i) {
			values[i] = data[offsets[i]:offsets[i+1]:offsets[i+1]]
		}
	}
	return values
}
