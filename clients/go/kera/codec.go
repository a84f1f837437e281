package kera

import (
	"bytes"
	"io"
	"sync"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

const (
	codecNone = 0
	codecLZ4  = 1
	codecZstd = 2
)

// Both are safe for use by many goroutines, and cost some memory each.
var (
	zstdWriter = sync.OnceValues(func() (*zstd.Encoder, error) {
		return zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	})
	zstdReader = sync.OnceValues(func() (*zstd.Decoder, error) {
		return zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(DecodedBytesMax))
	})
)

// decompress has exactly size bytes, or fails; it takes no more memory than that, whatever data claims.
func decompress(codec uint32, data []byte, size int64) ([]byte, error) {
	if size < 0 || size > DecodedBytesMax {
		return nil, corrupt("%d decompressed bytes are more than %d", size, DecodedBytesMax)
	}
	var reader io.Reader
	switch codec {
	case codecLZ4:
		reader = lz4.NewReader(bytes.NewReader(data))
	case codecZstd:
		return decompressZstd(data, size)
	default:
		return nil, corrupt("codec %d is unknown to this client", codec)
	}
	// Room grows with what comes, so that a small lie about a large size costs little.
	var out bytes.Buffer
	if n, err := io.Copy(&out, io.LimitReader(reader, size+1)); err != nil || n != size {
		return nil, corrupt("what is compressed is not the %d bytes that it says (%d, %v)", size, n, err)
	}
	return out.Bytes(), nil
}

func decompressZstd(data []byte, size int64) ([]byte, error) {
	var frame zstd.Header
	if err := frame.Decode(data); err != nil {
		return nil, corrupt("this is not a Zstandard frame: %v", err)
	}
	if frame.HasFCS && frame.FrameContentSize != uint64(size) {
		return nil, corrupt("a frame of %d bytes should have %d", frame.FrameContentSize, size)
	}
	decoder, err := zstdReader()
	if err != nil {
		return nil, err
	}
	out, err := decoder.DecodeAll(data, nil)
	if err != nil || int64(len(out)) != size {
		return nil, corrupt("what is compressed is not the %d bytes that it says (%d, %v)", size, len(out), err)
	}
	return out, nil
}

func compress(codec uint32, data []byte) ([]byte, error) {
	if codec == codecZstd {
		encoder, err := zstdWriter()
		if err != nil {
			return nil, err
		}
		return encoder.EncodeAll(data, nil), nil
	}
	var out bytes.Buffer
	writer := lz4.NewWriter(&out)
	if _, err := writer.Write(data); err != nil {
		return nil, err
	}
	if err := writer.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
