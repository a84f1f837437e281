package kera

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	kerav1 "kera.example/client/kera/v1"
)

// The test vectors of the project: what a client in any language is held against.
type vectors struct {
	Chunks []struct {
		What    string
		Header  map[string]json.Number
		Payload hexBytes
		Chunk   hexBytes
		Placed  hexBytes
		Records []map[string]any
	}
	Damaged []struct {
		Why   string
		Chunk hexBytes
	} `json:"damaged_chunks"`
	Unreadable []struct {
		Why   string
		Chunk hexBytes
	} `json:"unreadable_chunks"`
	Punctuations []struct {
		TimestampUs int64 `json:"timestamp_us"`
		Chunk       hexBytes
	}
	Keys []struct {
		Key       hexBytes
		CRC32C    uint32
		Streamlet map[string]uint32
	}
	Errors []struct {
		Code, Message string
		Retriable     bool
		Attributes    map[string]any
		Error         hexBytes
	}
}

type hexBytes []byte

func (h *hexBytes) UnmarshalText(text []byte) error {
	data, err := hex.DecodeString(string(text))
	*h = data
	return err
}

func readVectors(t testing.TB) *vectors {
	t.Helper()
	file, ok := os.LookupEnv("KERA_VECTORS") // others, with which tests/chaos/go_chunks.py compares this client with Python
	if !ok {
		file = "../../../docs/vectors.json"
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var v vectors
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	if err := decoder.Decode(&v); err != nil {
		t.Fatal(err)
	}
	return &v
}

func TestChunksAreReadAsTheVectorsSay(t *testing.T) {
	for _, vector := range readVectors(t).Chunks {
		t.Run(vector.What, func(t *testing.T) {
			header, payload, rest, err := ParseChunk(vector.Placed)
			if err != nil {
				t.Fatal(err)
			}
			if len(rest) > 0 || !bytes.Equal(payload, vector.Payload) {
				t.Errorf("payload or rest are others: %x, %x", payload, rest)
			}
			if got := headerFields(header); !reflect.DeepEqual(got, vector.Header) {
				t.Errorf("header\n%v, should be\n%v", got, vector.Header)
			}
			if got := EncodeChunk(header, payload); !bytes.Equal(got, vector.Chunk) {
				t.Errorf("encoded again\n%x, should be\n%x", got, vector.Chunk)
			}
			if header.SchemaID != 1 { // a schema of its own: its payload is for an Arrow library
				return
			}
			records, err := DecodeRecords(header, payload)
			if err != nil {
				t.Fatal(err)
			}
			if got := recordsAsJSON(t, records); !reflect.DeepEqual(got, vector.Records) {
				t.Errorf("records\n%v, should be\n%v", got, vector.Records)
			}
		})
	}
}

func TestLeanPayloadsAreWrittenAsTheVectorsHaveThem(t *testing.T) {
	for _, vector := range readVectors(t).Chunks {
		header, payload, _, err := ParseChunk(vector.Placed)
		if err != nil || header.SchemaID != 1 || header.Version != versionLean {
			continue
		}
		t.Run(vector.What, func(t *testing.T) {
			records, err := DecodeRecords(header, payload)
			if err != nil {
				t.Fatal(err)
			}
			again, err := encodeLean(columnsOf(records), header.Codec)
			if err != nil {
				t.Fatal(err)
			}
			if header.Codec == codecNone && !bytes.Equal(again, payload) {
				t.Errorf("payload\n%x, should be\n%x", again, payload)
			}
			decoded, err := decodeLean(again, len(records), header.Codec)
			if err != nil {
				t.Fatal(err)
			}
			if got, _ := decoded.records(); !reflect.DeepEqual(got, records) {
				t.Errorf("records\n%v, should be\n%v", got, records)
			}
		})
	}
}

func TestDamagedChunksAreRefused(t *testing.T) {
	for _, vector := range readVectors(t).Damaged {
		t.Run(vector.Why, func(t *testing.T) {
			if _, _, _, err := ParseChunk(vector.Chunk); CodeOf(err) != codeCorruptChunk {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestPunctuationsHaveNoRecords(t *testing.T) {
	for _, vector := range readVectors(t).Punctuations {
		header, payload, rest, err := ParseChunk(vector.Chunk)
		if err != nil {
			t.Fatal(err)
		}
		if !header.IsPunctuation() || len(payload) > 0 || len(rest) > 0 || header.MaxUs != vector.TimestampUs {
			t.Errorf("got %+v", header)
		}
	}
}

func TestChunksThatCannotBeReadAreRefused(t *testing.T) {
	for _, vector := range readVectors(t).Unreadable {
		t.Run(vector.Why, func(t *testing.T) {
			header, payload, _, err := ParseChunk(vector.Chunk)
			if err != nil {
				t.Fatal(err)
			}
			if records, err := DecodeRecords(header, payload); CodeOf(err) != codeCorruptChunk {
				t.Errorf("got %v, %v", records, err)
			}
		})
	}
}

func TestKeysGoToTheStreamletsOfTheVectors(t *testing.T) {
	for _, vector := range readVectors(t).Keys {
		if got := crc32.Checksum(vector.Key, castagnoli); got != vector.CRC32C {
			t.Errorf("checksum of %x is %08x, should be %08x", vector.Key, got, vector.CRC32C)
		}
		for m, want := range vector.Streamlet {
			streamlets, err := strconv.ParseUint(m, 10, 32)
			if err != nil {
				t.Fatal(err)
			}
			if got := StreamletOf(vector.Key, uint32(streamlets)); got != want {
				t.Errorf("%x of %s goes to %d, should go to %d", vector.Key, m, got, want)
			}
		}
	}
}

func TestErrorsAreReadAsTheVectorsSay(t *testing.T) {
	for _, vector := range readVectors(t).Errors {
		t.Run(vector.Code, func(t *testing.T) {
			var message kerav1.Error
			if err := proto.Unmarshal(vector.Error, &message); err != nil {
				t.Fatal(err)
			}
			got, ok := errorOf(&message).(*Error)
			if !ok || got.Code != vector.Code || got.Message != vector.Message || got.Retriable != vector.Retriable {
				t.Errorf("got %v", got)
			}
			for name, want := range vector.Attributes {
				var value any
				if !got.Attribute(name, &value) || fmt.Sprint(value) != fmt.Sprint(want) {
					t.Errorf("%s is %v, should be %v", name, value, want)
				}
			}
		})
	}
}

func headerFields(header Header) map[string]json.Number {
	names := strings.Fields(`version flags payload_bytes record_count stream_id streamlet_id schema_id producer_id
		producer_epoch codec sequence created_us min_timestamp_us max_timestamp_us payload_crc32c header_crc32c group_id
		segment_id entry first_record broker_epoch durable_head placement_crc32c`)
	fields := map[string]json.Number{"header_bytes": "128"}
	value := reflect.ValueOf(header)
	for i, name := range names {
		fields[name] = json.Number(fmt.Sprint(value.Field(i).Interface()))
	}
	return fields
}

func recordsAsJSON(t *testing.T, records []Record) []map[string]any {
	t.Helper()
	var all []map[string]any
	for _, record := range records {
		one := map[string]any{
			"timestamp": json.Number(fmt.Sprint(record.Time.UnixMicro())),
			"keys":      nil, "value": bytesAsJSON(record.Value), "headers": nil,
		}
		if record.Keys != nil {
			keys := []any{}
			for _, key := range record.Keys {
				keys = append(keys, bytesAsJSON(key))
			}
			one["keys"] = keys
		}
		if record.Headers != nil {
			headers := []any{}
			for _, header := range record.Headers {
				headers = append(headers, []any{header.Name, bytesAsJSON(header.Value)})
			}
			one["headers"] = headers
		}
		all = append(all, one)
	}
	return all
}

func bytesAsJSON(data []byte) any {
	if data == nil {
		return nil
	}
	return hex.EncodeToString(data)
}
