package kera

import (
	"reflect"
	"testing"
)

// FuzzPayloads opens payloads that anybody may have written: none may end the process, take memory beyond its bound, or
// be read in two ways. `go test` runs the vectors, `go test -fuzz FuzzPayloads ./kera` goes on from there.
func FuzzPayloads(f *testing.F) {
	for _, vector := range readVectors(f).Chunks {
		header, payload, _, err := ParseChunk(vector.Placed)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(header.Version, header.Codec, header.RecordCount, payload)
	}
	for _, vector := range readVectors(f).Unreadable {
		header, payload, _, err := ParseChunk(vector.Chunk)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(header.Version, header.Codec, header.RecordCount, payload)
	}
	f.Fuzz(func(t *testing.T, version uint8, codec, records uint32, payload []byte) {
		header := Header{Version: 1 + version%2, Codec: codec % 3, RecordCount: 1 + records%10_000}
		decoded, err := DecodeRecords(header, payload)
		if err != nil {
			if CodeOf(err) != codeCorruptChunk {
				t.Errorf("refused with %v", err)
			}
			return
		}
		if len(decoded) != int(header.RecordCount) {
			t.Fatalf("%d records of %d", len(decoded), header.RecordCount)
		}
		again, err := encodeLean(columnsOf(decoded), codecNone)
		if err != nil {
			t.Fatal(err)
		}
		read, err := DecodeRecords(Header{Version: versionLean, RecordCount: header.RecordCount}, again)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(read, decoded) {
			t.Errorf("%v\nis read again as\n%v", decoded, read)
		}
	})
}

func FuzzChunks(f *testing.F) {
	for _, vector := range readVectors(f).Chunks {
		f.Add([]byte(vector.Placed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		header, payload, rest, err := ParseChunk(data)
		if err == nil && (len(payload) != int(header.PayloadBytes) || len(rest) > len(data)-headerBytes) {
			t.Errorf("%d bytes of payload, %d are left", len(payload), len(rest))
		}
	})
}
