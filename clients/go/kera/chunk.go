package kera

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

const (
	headerBytes     = 128
	alignment       = 64
	placementAt     = 88
	versionArrow    = 1
	versionLean     = 2
	flagCompressed  = 1
	flagPunctuation = 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Header is that of a chunk: docs/format.md says what its fields mean.
type Header struct {
	Version       uint8
	Flags         uint8
	PayloadBytes  uint32
	RecordCount   uint32
	StreamID      uint64
	StreamletID   uint32
	SchemaID      uint32
	ProducerID    uint64
	ProducerEpoch uint32
	Codec         uint32
	Sequence      uint64
	CreatedUs     int64
	MinUs         int64
	MaxUs         int64
	PayloadCRC    uint32
	HeaderCRC     uint32

	// The placement, which the broker writes: all zero in what a producer sends.
	GroupID      uint64
	SegmentID    uint32
	Entry        uint32
	FirstRecord  uint64
	BrokerEpoch  uint64
	DurableHead  uint32
	PlacementCRC uint32
}

// paddedBytes is how long a payload is in a chunk.
func paddedBytes(payloadBytes int) int {
	return (payloadBytes + alignment - 1) / alignment * alignment
}

// EncodeChunk makes the chunk that a producer sends. It sets the length of the payload and both checksums of the
// header, and leaves the placement zero.
func EncodeChunk(header Header, payload []byte) []byte {
	chunk := make([]byte, headerBytes+paddedBytes(len(payload)))
	copy(chunk[headerBytes:], payload)
	copy(chunk, "KERA")
	chunk[4], chunk[5] = header.Version, header.Flags
	le := binary.LittleEndian
	le.PutUint16(chunk[6:], headerBytes)
	le.PutUint32(chunk[8:], uint32(len(payload)))
	le.PutUint32(chunk[12:], header.RecordCount)
	le.PutUint64(chunk[16:], header.StreamID)
	le.PutUint32(chunk[24:], header.StreamletID)
	le.PutUint32(chunk[28:], header.SchemaID)
	le.PutUint64(chunk[32:], header.ProducerID)
	le.PutUint32(chunk[44:], header.Codec)
	le.PutUint64(chunk[56:], uint64(header.CreatedUs))
	le.PutUint64(chunk[64:], uint64(header.MinUs))
	le.PutUint64(chunk[72:], uint64(header.MaxUs))
	le.PutUint32(chunk[80:], crc32.Checksum(chunk[headerBytes:], castagnoli))
	renumber(chunk, header.ProducerEpoch, header.Sequence)
	return chunk
}

// renumber gives a finished chunk another epoch and sequence.
func renumber(chunk []byte, epoch uint32, sequence uint64) {
	le := binary.LittleEndian
	le.PutUint32(chunk[40:], epoch)
	le.PutUint64(chunk[48:], sequence)
	le.PutUint32(chunk[84:], crc32.Checksum(chunk[:84], castagnoli))
}

// ParseChunk takes the first chunk off data, which a broker has placed, and checks all of its checksums. The payload is
// a part of data.
func ParseChunk(data []byte) (header Header, payload, rest []byte, err error) {
	if len(data) < headerBytes {
		return header, nil, nil, corrupt("%d bytes are too few for a header", len(data))
	}
	le := binary.LittleEndian
	if string(data[:4]) != "KERA" {
		return header, nil, nil, corrupt("the magic is %q", data[:4])
	}
	if want, got := le.Uint32(data[84:]), crc32.Checksum(data[:84], castagnoli); want != got {
		return header, nil, nil, corrupt("the header's checksum is %08x, its bytes have %08x", want, got)
	}
	if data[4] != versionArrow && data[4] != versionLean {
		return header, nil, nil, corrupt("version %d is unknown to this client", data[4])
	}
	if size := le.Uint16(data[6:]); size != headerBytes {
		return header, nil, nil, corrupt("its header says that it has %d bytes", size)
	}
	if want, got := le.Uint32(data[124:]), crc32.Checksum(data[placementAt:124], castagnoli); want != got {
		return header, nil, nil, corrupt("the placement's checksum is %08x, its bytes have %08x", want, got)
	}
	header = Header{
		Version:       data[4],
		Flags:         data[5],
		PayloadBytes:  le.Uint32(data[8:]),
		RecordCount:   le.Uint32(data[12:]),
		StreamID:      le.Uint64(data[16:]),
		StreamletID:   le.Uint32(data[24:]),
		SchemaID:      le.Uint32(data[28:]),
		ProducerID:    le.Uint64(data[32:]),
		ProducerEpoch: le.Uint32(data[40:]),
		Codec:         le.Uint32(data[44:]),
		Sequence:      le.Uint64(data[48:]),
		CreatedUs:     int64(le.Uint64(data[56:])),
		MinUs:         int64(le.Uint64(data[64:])),
		MaxUs:         int64(le.Uint64(data[72:])),
		PayloadCRC:    le.Uint32(data[80:]),
		HeaderCRC:     le.Uint32(data[84:]),
		GroupID:       le.Uint64(data[88:]),
		SegmentID:     le.Uint32(data[96:]),
		Entry:         le.Uint32(data[100:]),
		FirstRecord:   le.Uint64(data[104:]),
		BrokerEpoch:   le.Uint64(data[112:]),
		DurableHead:   le.Uint32(data[120:]),
		PlacementCRC:  le.Uint32(data[124:]),
	}
	// As 64 bits, which no length that fits into 32 overflows.
	padded := (int64(header.PayloadBytes) + alignment - 1) / alignment * alignment
	if int64(len(data)-headerBytes) < padded {
		return header, nil, nil, corrupt("its payload of %d bytes is cut short", header.PayloadBytes)
	}
	end := headerBytes + int(padded)
	if got := crc32.Checksum(data[headerBytes:end], castagnoli); got != header.PayloadCRC {
		return header, nil, nil, corrupt("the payload's checksum is %08x, its bytes have %08x", header.PayloadCRC, got)
	}
	if header.IsPunctuation() != (header.RecordCount == 0) || header.IsPunctuation() && header.PayloadBytes != 0 {
		return header, nil, nil, corrupt("it has %d records and flags %d", header.RecordCount, header.Flags)
	}
	return header, data[headerBytes : headerBytes+int(header.PayloadBytes)], data[end:], nil
}

// IsPunctuation says whether it has no records, and only says that nothing older than its times comes behind it.
func (h *Header) IsPunctuation() bool {
	return h.Flags&flagPunctuation != 0
}

// StreamletOf says where records with a key go. All producers of a stream have to agree on that.
func StreamletOf(key []byte, streamlets uint32) uint32 {
	return crc32.Checksum(key, castagnoli) % streamlets
}

func corrupt(format string, args ...any) error {
	return &Error{Code: codeCorruptChunk, Message: fmt.Sprintf(format, args...)}
}
