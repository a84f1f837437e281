package kera

import (
	"encoding/binary"
	"math"
)

// The payload of version 2, of the default schema's columns: docs/format.md has it for all types.

const (
	kindNull   = 0
	kindInt64  = 5
	kindBinary = 8
	kindText   = 9
	kindList   = 12
	kindStruct = 15

	someNull = 1 << 5

	// How values or places are written, in bits 6 and 7.
	plain       = 0
	alike       = 1
	differences = 2
	lengths8    = 2
	lengths16   = 3

	varintMax = 1 << 40
)

// encodeLean is the payload, compressed if codec is not 0.
func encodeLean(c *columns, codec uint32) ([]byte, error) {
	w := &leanWriter{}
	w.times(c.times)
	w.list(c.keys, func() { w.bytes(kindBinary, c.keyItems) })
	w.bytes(kindBinary, c.values)
	w.list(c.headers, func() {
		w.nodes = append(w.nodes, kindStruct, 2)
		w.bytes(kindText, c.headerNames)
		w.bytes(kindBinary, c.headerItems)
	})
	payload := binary.LittleEndian.AppendUint16(nil, uint16(len(w.nodes)))
	body := w.body
	if codec != codecNone {
		payload = binary.LittleEndian.AppendUint32(payload, uint32(len(body)))
		var err error
		if body, err = compress(codec, body); err != nil {
			return nil, err
		}
	}
	payload = append(payload, w.nodes...)
	payload = append(payload, make([]byte, -len(payload)&7)...)
	return append(payload, body...), nil
}

type leanWriter struct {
	nodes, body []byte
}

// align puts zeros before a buffer whose numbers have so many bytes.
func (w *leanWriter) align(width int) {
	w.body = append(w.body, make([]byte, -len(w.body)&(width-1))...)
}

func (w *leanWriter) times(values []int64) {
	least, most := values[0], values[0]
	for _, value := range values {
		least, most = min(least, value), max(most, value)
	}
	difference := uint64(most) - uint64(least)
	width := 4
	switch {
	case difference == 0:
		w.nodes = append(w.nodes, kindInt64|alike<<6)
		w.nodes = binary.LittleEndian.AppendUint64(w.nodes, uint64(least))
		return
	case difference > math.MaxUint32:
		w.nodes = append(w.nodes, kindInt64|plain<<6)
		w.align(8)
		for _, value := range values {
			w.body = binary.LittleEndian.AppendUint64(w.body, uint64(value))
		}
		return
	case difference <= math.MaxUint8:
		width = 1
	case difference <= math.MaxUint16:
		width = 2
	}
	w.nodes = append(w.nodes, kindInt64|differences<<6)
	w.nodes = binary.LittleEndian.AppendUint64(w.nodes, uint64(least))
	w.nodes = append(w.nodes, byte(width))
	w.align(width)
	for _, value := range values {
		w.body = appendNumber(w.body, uint64(value)-uint64(least), width)
	}
}

func (w *leanWriter) bytes(kind byte, values [][]byte) {
	lengths, nulls, total := make([]int, len(values)), make([]bool, len(values)), 0
	for i, value := range values {
		lengths[i], nulls[i] = len(value), value == nil
		total += len(value)
	}
	if w.node(kind, lengths, nulls, total, func() {}) {
		for _, value := range values {
			w.body = append(w.body, value...)
		}
	}
}

func (w *leanWriter) list(rows []span, within func()) {
	lengths, nulls, total := make([]int, len(rows)), make([]bool, len(rows)), 0
	for i, row := range rows {
		lengths[i], nulls[i] = row.length(), row.null
		total += row.length()
	}
	w.node(kindList, lengths, nulls, total, within)
}

// node writes one of binary values or lists, with what is within it; its buffers are which are null and the places. It
// returns false if all are null, and nothing else follows.
func (w *leanWriter) node(kind byte, lengths []int, nulls []bool, total int, within func()) bool {
	null, longest, shortest := 0, 0, math.MaxInt
	for i, length := range lengths {
		if nulls[i] {
			null++
		}
		longest, shortest = max(longest, length), min(shortest, length)
	}
	if null > 0 && null == len(lengths) {
		w.nodes = append(w.nodes, kindNull)
		return false
	}
	if null > 0 {
		kind |= someNull
		bits := make([]byte, (len(nulls)+7)/8)
		for i := range nulls {
			if !nulls[i] {
				bits[i/8] |= 1 << (i % 8)
			}
		}
		w.body = append(w.body, bits...)
	}
	width := 0
	switch {
	case longest <= shortest: // also of no values at all
		kind |= alike << 6
	case longest <= math.MaxUint8:
		kind, width = kind|lengths8<<6, 1
	case longest <= math.MaxUint16:
		kind, width = kind|lengths16<<6, 2
	default:
		w.align(4)
		offset := uint32(0)
		w.body = binary.LittleEndian.AppendUint32(w.body, offset)
		for _, length := range lengths {
			offset += uint32(length)
			w.body = binary.LittleEndian.AppendUint32(w.body, offset)
		}
	}
	if width > 0 {
		w.align(width)
		for _, length := range lengths {
			w.body = appendNumber(w.body, uint64(length), width)
		}
	}
	w.nodes = append(w.nodes, kind)
	w.nodes = binary.AppendUvarint(w.nodes, uint64(total))
	within()
	return true
}

func appendNumber(data []byte, number uint64, width int) []byte {
	for range width {
		data = append(data, byte(number))
		number >>= 8
	}
	return data
}

// decodeLean has the columns of a payload with so many records.
func decodeLean(payload []byte, records int, codec uint32) (*columns, error) {
	front := 2
	if codec != codecNone {
		front = 6
	}
	if len(payload) < front {
		return nil, corrupt("%d bytes are too few for a lean payload", len(payload))
	}
	nodesEnd := front + int(binary.LittleEndian.Uint16(payload))
	bodyAt := (nodesEnd + 7) &^ 7
	if bodyAt > len(payload) {
		return nil, corrupt("the nodes reach out of the payload")
	}
	body := payload[bodyAt:]
	if codec != codecNone {
		var err error
		size := int64(binary.LittleEndian.Uint32(payload[2:]))
		if body, err = decompress(codec, body, size); err != nil {
			return nil, err
		}
	}
	r := &leanReader{nodes: payload[front:nodesEnd], body: body, room: DecodedBytesMax}
	c := r.columns(records)
	if r.err == nil && (len(r.nodes) > 0 || r.at != len(body)) {
		r.fail("%d bytes of nodes and %d of the body are left over", len(r.nodes), len(body)-r.at)
	}
	if r.err != nil {
		return nil, r.err
	}
	return c, nil
}

// leanReader takes nodes and their buffers in turn. The first error stays: from then on there is nothing to take, and
// all numbers are 0.
type leanReader struct {
	nodes []byte
	body  []byte
	at    int
	room  int
	err   error
}

func (r *leanReader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = corrupt(format, args...)
	}
}

func (r *leanReader) columns(records int) *columns {
	c := &columns{}
	c.times = r.times(records)
	var items int
	c.keys, items = r.list(records)
	c.keyItems = r.bytes(kindBinary, items)
	c.values = r.bytes(kindBinary, records)
	c.headers, items = r.list(records)
	if r.err == nil && items >= 0 {
		kind, written, nulls := r.node()
		if kind == kindNull && items == 0 {
			return c
		}
		if kind != kindStruct || written != plain || nulls || r.varint() != 2 {
			r.fail("the headers are not structs of two fields")
		}
		c.headerNames = r.bytes(kindText, items)
		c.headerItems = r.bytes(kindBinary, items)
	}
	return c
}

// count takes room for so many values, so that few bytes cannot become very many slices.
func (r *leanReader) count(values int) bool {
	if values > r.room/valueBytes {
		r.fail("its values take more than %d bytes", DecodedBytesMax)
		return false
	}
	r.room -= values * valueBytes
	return r.err == nil
}

func (r *leanReader) take(bytes int) []byte {
	if r.err != nil || bytes > len(r.nodes) {
		r.fail("the nodes are cut short")
		return make([]byte, bytes)
	}
	taken := r.nodes[:bytes]
	r.nodes = r.nodes[bytes:]
	return taken
}

func (r *leanReader) node() (kind, written byte, nulls bool) {
	first := r.take(1)[0]
	if first&31 == kindNull && first != kindNull {
		r.fail("nulls with an encoding")
	}
	return first & 31, first >> 6, first&someNull != 0
}

func (r *leanReader) varint() int {
	number, n := binary.Uvarint(r.nodes)
	if r.err != nil || n <= 0 || number > varintMax {
		r.fail("a number in the nodes is cut short or too large")
		return 0
	}
	r.nodes = r.nodes[n:]
	return int(number)
}

// buffer takes values of some width from the body; nil if there are not so many.
func (r *leanReader) buffer(values, width int) []byte {
	at := (r.at + width - 1) &^ (width - 1)
	if r.err != nil || at > len(r.body) || values > (len(r.body)-at)/width {
		r.fail("a buffer reaches out of the body")
		return nil
	}
	r.at = at + values*width
	return r.body[at:r.at]
}

// valid says which of so many values are there.
func (r *leanReader) valid(nulls bool, values int) func(int) bool {
	if !nulls {
		return func(int) bool { return true }
	}
	bits := r.buffer((values+7)/8, 1)
	if bits == nil {
		return func(int) bool { return false }
	}
	return func(i int) bool { return bits[i/8]>>(i%8)&1 == 1 }
}

func (r *leanReader) times(records int) []int64 {
	kind, written, nulls := r.node()
	if kind != kindInt64 || nulls {
		r.fail("the times are of kind %d, or some are null", kind)
	}
	if !r.count(records) {
		return nil
	}
	times := make([]int64, records)
	switch written {
	case plain:
		if data := r.buffer(records, 8); data != nil {
			for i := range times {
				times[i] = int64(binary.LittleEndian.Uint64(data[8*i:]))
			}
		}
	case alike:
		value := int64(binary.LittleEndian.Uint64(r.take(8)))
		for i := range times {
			times[i] = value
		}
	case differences:
		least := binary.LittleEndian.Uint64(r.take(8))
		width := int(r.take(1)[0])
		if width != 1 && width != 2 && width != 4 {
			r.fail("differences of %d bytes", width)
			return nil
		}
		if data := r.buffer(records, width); data != nil {
			for i := range times {
				times[i] = int64(least + number(data[i*width:], width))
			}
		}
	default:
		r.fail("times are written as %d", written)
	}
	return times
}

// list takes a node of lists but for what is within: its rows, and how many values all of them have; -1: nothing is said
// of what is within.
func (r *leanReader) list(rows int) (spans []span, items int) {
	kind, written, nulls := r.node()
	if !r.count(rows) {
		return nil, -1
	}
	spans = make([]span, rows)
	if kind == kindNull {
		for i := range spans {
			spans[i].null = true
		}
		return spans, -1
	}
	if kind != kindList {
		r.fail("lists are of kind %d", kind)
		return nil, -1
	}
	items = r.varint()
	valid := r.valid(nulls, rows)
	r.places(written, rows, items, func(i, start, end int) { spans[i] = span{start, end, !valid(i)} })
	return spans, items
}

// bytes takes a node of binary values or text; the values are parts of the body. Of -1 values there is none.
func (r *leanReader) bytes(want byte, count int) [][]byte {
	if r.err != nil || count < 0 || !r.count(count) {
		return nil
	}
	kind, written, nulls := r.node()
	values := make([][]byte, count)
	if kind == kindNull {
		return values
	}
	if kind != want {
		r.fail("a column of kind %d should be one of %d", kind, want)
		return values
	}
	if nulls && kind == kindText { // only the names of headers are text, which are keys of a map
		r.fail("names of headers are null")
	}
	total := r.varint()
	valid := r.valid(nulls, count)
	ends := make([]int, count+1)
	r.places(written, count, total, func(i, _, end int) { ends[i+1] = end })
	data := r.buffer(total, 1)
	if r.err != nil {
		return values
	}
	for i := range values {
		if valid(i) {
			values[i] = data[ends[i]:ends[i+1]:ends[i+1]]
		}
	}
	return values
}

// places takes where each of count values begins and ends, which have total within them.
func (r *leanReader) places(written byte, count, total int, each func(i, start, end int)) {
	width := 4
	switch written {
	case plain:
		data := r.buffer(count+1, width)
		if data == nil {
			return
		}
		start := int(number(data, width))
		if start != 0 {
			r.fail("offsets begin with %d", start)
			return
		}
		for i := range count {
			end := int(number(data[(i+1)*width:], width))
			if end < start || end > total {
				r.fail("offsets fall, or reach beyond the end")
				return
			}
			each(i, start, end)
			start = end
		}
		if start != total {
			r.fail("offsets end with %d, there are %d", start, total)
		}
		return
	case alike:
		if count == 0 && total == 0 {
			return
		}
		if count == 0 || total%count != 0 {
			r.fail("%d cannot be divided among %d", total, count)
			return
		}
		length := total / count
		for i := range count {
			each(i, i*length, (i+1)*length)
		}
		return
	case lengths8:
		width = 1
	case lengths16:
		width = 2
	}
	data := r.buffer(count, width)
	if data == nil {
		return
	}
	start := 0
	for i := range count {
		end := start + int(number(data[i*width:], width))
		if end > total {
			r.fail("lengths reach beyond the end")
			return
		}
		each(i, start, end)
		start = end
	}
	if start != total {
		r.fail("lengths add up to %d, there are %d", start, total)
	}
}

func number(data []byte, width int) uint64 {
	switch width {
	case 1:
		return uint64(data[0])
	case 2:
		return uint64(binary.LittleEndian.Uint16(data))
	default:
		return uint64(binary.LittleEndian.Uint32(data))
	}
}
