package kera.wire;

import java.io.IOException;
import java.io.OutputStream;
import java.nio.ByteBuffer;

import com.github.luben.zstd.Zstd;
import net.jpountz.lz4.LZ4FrameOutputStream;

/** Compresses bodies of lean payloads with libraries that Spark ships; codec numbers are those of chunk headers. */
final class Compression {

    static final int NONE = 0;
    static final int LZ4 = 1;
    static final int ZSTD = 2;

    /** Arrow's default. */
    private static final int ZSTD_LEVEL = 1;
    /** Overhead of a frame and of its first block. */
    private static final int FRAME_BYTES = 64;
    /** Incompressible data grows by at most this share of it, as a number of bits to shift by. */
    private static final int EXCESS_SHIFT = 7;

    private Compression() {
    }

    /** The maximum compressed size of {@code bytes} bytes. */
    static long bound(long bytes) {
        return bytes + (bytes >>> EXCESS_SHIFT) + FRAME_BYTES;
    }

    /** Compress the bytes into one frame, at the position of {@code out}. */
    static void compress(int codec, byte[] from, int at, int bytes, ByteBuffer out) {
        if (codec == ZSTD) {
            byte[] frame = new byte[Math.toIntExact(Zstd.compressBound(bytes))];
            long size = Zstd.compressByteArray(frame, 0, frame.length, from, at, bytes, ZSTD_LEVEL);
            if (Zstd.isError(size)) {
                throw new IllegalStateException("cannot compress: " + Zstd.getErrorName(size));
            }
            out.put(frame, 0, (int) size);
            return;
        }
        try (OutputStream frame = new LZ4FrameOutputStream(new Into(out))) {
            frame.write(from, at, bytes);
        } catch (IOException error) {
            throw new IllegalStateException(error); // cannot happen: there is no input or output
        }
    }

    /** A stream that writes to a buffer. */
    private static final class Into extends OutputStream {
        private final ByteBuffer out;

        Into(ByteBuffer out) {
            this.out = out;
        }

        @Override
        public void write(int one) {
            out.put((byte) one);
        }

        @Override
        public void write(byte[] from, int at, int bytes) {
            out.put(from, at, bytes);
        }
    }
}
