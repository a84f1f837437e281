package kera.columns;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/**
 * Decompresses the LZ4 frame that Arrow writes for each buffer.
 *
 * <p>The classes that Spark ships do not fit: one is some twenty times slower, the other refuses blocks that refer to
 * earlier blocks. Checksums are not verified, because the chunk has its own. Invalid frames of any kind raise an
 * exception.
 */
final class Lz4Frame {
    private static final int MAGIC = 0x184D2204;
    private static final int FIXED_BYTES = 7; // magic, flags, block size, checksum of the header
    private static final int CONTENT_SIZE = 1 << 3;
    private static final int DICTIONARY = 1;
    private static final int BLOCK_CHECKSUMS = 1 << 4;
    private static final int VERSION_SHIFT = 6;
    private static final int MATCH_BYTES_MIN = 4;
    private static final int EXTENDED = 15;

    private final byte[] from;
    private final byte[] to;
    private int in;
    private int out;

    private Lz4Frame(byte[] from, byte[] to) {
        this.from = from;
        this.to = to;
    }

    /** Decompress the single frame in `from`; its content must have `size` bytes. */
    static byte[] decompressed(byte[] from, int size) {
        Lz4Frame frame = new Lz4Frame(from, new byte[size]);
        frame.read();
        if (frame.out != size) {
            throw new IllegalArgumentException("a frame of " + frame.out + " bytes that should be " + size);
        }
        return frame.to;
    }

    private void read() {
        ByteBuffer frame = ByteBuffer.wrap(from).order(ByteOrder.LITTLE_ENDIAN);
        int flags = frame.get(4);
        if (frame.getInt(0) != MAGIC || (flags & 0xFF) >> VERSION_SHIFT != 1 || (flags & DICTIONARY) != 0) {
            throw new IllegalArgumentException("not an LZ4 frame that can be read");
        }
        in = FIXED_BYTES + ((flags & CONTENT_SIZE) != 0 ? Long.BYTES : 0);
        for (int head = next(frame); head != 0; head = next(frame)) {
            int bytes = head & Integer.MAX_VALUE;
            if (bytes > from.length - in) {
                throw new IllegalArgumentException("a block of " + bytes + " bytes");
            }
            if (head < 0) { // not compressed
                copy(bytes);
            } else {
                block(in + bytes);
            }
            in += (flags & BLOCK_CHECKSUMS) != 0 ? Integer.BYTES : 0;
        }
    }

    private int next(ByteBuffer frame) {
        int head = frame.getInt(in);
        in += Integer.BYTES;
        return head;
    }

    private void copy(int bytes) {
        System.arraycopy(from, in, to, out, bytes);
        in += bytes;
        out += bytes;
    }

    /** Decompress a block up to `end`: literals and matches in turn, with no match after the last literals. */
    private void block(int end) {
        while (in < end) {
            int token = from[in++] & 0xFF;
            copy(length(token >> 4));
            if (in >= end) {
                break;
            }
            int distance = from[in] & 0xFF | (from[in + 1] & 0xFF) << 8;
            in += Short.BYTES;
            match(distance, Math.addExact(length(token & EXTENDED), MATCH_BYTES_MIN));
        }
        if (in != end) {
            throw new IllegalArgumentException("a block that does not end where it should");
        }
    }

    private int length(int coded) {
        int length = coded;
        if (coded == EXTENDED) {
            int more;
            do {
                more = from[in++] & 0xFF;
                length = Math.addExact(length, more);
            } while (more == 0xFF);
        }
        return length;
    }

    private void match(int distance, int bytes) {
        if (distance == 0 || distance > out || bytes > to.length - out) {
            throw new IllegalArgumentException("a match of " + bytes + " bytes, " + distance + " before");
        }
        if (distance >= bytes) {
            System.arraycopy(to, out - distance, to, out, bytes);
        } else { // the match overlaps its own output
            for (int at = out; at < out + bytes; at++) {
                to[at] = to[at - distance];
            }
        }
        out += bytes;
    }
}
