package kera.columns;

import com.github.luben.zstd.Zstd;
import kera.wire.Chunk;
import kera.wire.KeraException;
import java.lang.ref.Reference;
import java.util.ArrayList;
import java.util.List;
import org.apache.arrow.memory.ArrowBuf;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.memory.ForeignAllocation;
import org.apache.spark.unsafe.Platform;

/**
 * The record batch in a chunk's payload, read field by field in the order of the schema.
 *
 * <p>The metadata that locates the values is read from a private copy, and every returned buffer is a checked range of
 * the payload, or a copy. So reads stay inside the payload, whatever happens to its bytes meanwhile. Invalid data
 * raises a {@link KeraException} CorruptChunk, or an exception of flatbuffers, of a codec or of Java's arrays that
 * means the same.
 */
abstract class Body {
    /** Maximum size of all decompressed buffers of a chunk together, and of its values; the same as in the SDK. */
    private static final long DECOMPRESSED_BYTES_MAX = 128L << 20;
    /** Maximum ratio of the stated size to the compressed size; neither codec can compress more. */
    private static final long LZ4_RATIO_MAX = 256;
    private static final long ZSTD_RATIO_MAX = 32768;
    /** Size of the blocks that hold small copies: allocating each copy would cost more than writing it. */
    private static final int BLOCK_BYTES = 4096;

    final BufferAllocator allocator;
    private final List<ArrowBuf> owned = new ArrayList<>();
    private ArrowBuf block;
    private long blockUsed;
    private long decompressedBytes;
    private long writtenOutBytes;
    private long room;

    Body(BufferAllocator allocator) {
        this.allocator = allocator;
    }

    /** Begin with the first field of the batch in `chunk`, which must have as many rows as the chunk's header says. */
    abstract void open(Chunk chunk);

    /** Move on to the next field and return its number of values; its buffers must be taken next. */
    abstract int node();

    /** The number of nulls in the field of the last {@link #node}; valid after {@link #validity}. */
    abstract int nulls();

    /** The next buffer, the bits that say which of a field's `count` values are not null; empty if none is null. */
    abstract ArrowBuf validity(int count);

    /** The next buffer, which must have at least `needed` bytes. */
    abstract ArrowBuf data(long needed);

    /**
     * The next buffer, the offsets of `count` values, as a copy that is checked to be ascending; see {@link #end}.
     *
     * @param width size of an offset: 4 or 8 bytes
     */
    abstract ArrowBuf offsets(int count, int width);

    /** The number of data buffers of the next view field. */
    abstract int variadic();

    /** Skip a field with all nested fields; return the number of its values. */
    abstract int skip(SkippedField field);

    /** The exception for bytes that are not a record batch of the stream's schema. */
    abstract KeraException corrupt(String what);

    /** The last of the `offsets` of `count` values, where the last value ends. */
    static long end(ArrowBuf offsets, int count, int width) {
        return width == Integer.BYTES ? offsets.getInt((long) count * width) : offsets.getLong((long) count * width);
    }

    /** The number of bytes that `count` bits take. */
    static long bits(int count) {
        return (count + 7L) / 8;
    }

    /** How many of the `count` bits at `bits` are 0, which means null. */
    static int zeroBits(long bits, int count) {
        int ones = 0;
        int at = 0;
        for (; at + Long.SIZE <= count; at += Long.SIZE) {
            ones += Long.bitCount(Platform.getLong(null, bits + at / Byte.SIZE));
        }
        for (; at < count; at += Byte.SIZE) {
            int there = (1 << Math.min(Byte.SIZE, count - at)) - 1;
            ones += Integer.bitCount(Platform.getByte(null, bits + at / Byte.SIZE) & there);
        }
        return count - ones;
    }

    /**
     * Add `bytes` to the size that the values would have if each were written out; too large a total is an error. Each
     * value counts as at least one byte, even if it takes none in the chunk, and values that share bytes are counted in
     * full. The SDK has the same rule.
     */
    final void writeOut(long bytes) {
        writtenOutBytes += bytes;
        if (writtenOutBytes > room) {
            throw corrupt("its values would become more than " + room + " bytes when each is written out");
        }
    }

    /** The total that {@link #writeOut} has counted. */
    final long writtenOut() {
        return writtenOutBytes;
    }

    /** Release the chunk and all copies. Loaded columns must not be read any more. */
    void release() {
        for (ArrowBuf each : owned) {
            each.close();
        }
        owned.clear();
        block = null;
    }

    /** The payload of `chunk`, whose body has `bodyBytes` bytes; starts counting as in {@link #beginCounting}. */
    final ArrowBuf begin(Chunk chunk, long bodyBytes, boolean compressed) {
        beginCounting(bodyBytes, compressed);
        return own(allocator.wrapForeignAllocation(new Lent(chunk)));
    }

    /** Reset the counters, for a body of `bodyBytes` bytes. */
    final void beginCounting(long bodyBytes, boolean compressed) {
        decompressedBytes = 0;
        writtenOutBytes = 0;
        room = compressed ? DECOMPRESSED_BYTES_MAX : Math.max(DECOMPRESSED_BYTES_MAX, Byte.SIZE * bodyBytes);
    }

    /** Decompress the `bytes` bytes at `at`; the result must have `size` bytes. */
    final ArrowBuf decompressed(ArrowBuf payload, long at, long bytes, long size, boolean zstd) {
        if (size < 0 || size > Integer.MAX_VALUE || size > bytes * (zstd ? ZSTD_RATIO_MAX : LZ4_RATIO_MAX)) {
            throw corrupt(bytes + " bytes that would be " + size);
        }
        decompressedBytes += size;
        if (decompressedBytes > DECOMPRESSED_BYTES_MAX) {
            throw corrupt("its buffers would become more than " + DECOMPRESSED_BYTES_MAX + " bytes");
        }
        // Decompress a copy: codecs read some bytes twice, and rely on them not to change in between.
        byte[] copy = new byte[(int) bytes];
        payload.getBytes(at, copy);
        byte[] content = zstd ? unpacked(copy, (int) size) : Lz4Frame.decompressed(copy, (int) size);
        ArrowBuf made = scratch(size);
        made.setBytes(0, content);
        return made;
    }

    private byte[] unpacked(byte[] frame, int size) {
        byte[] content = new byte[size];
        long found = Zstd.decompress(content, frame);
        if (found != size) { // error codes are never valid sizes
            throw corrupt("a compressed buffer that is not " + size + " bytes");
        }
        return content;
    }

    /** Uninitialized private memory for `bytes` bytes. */
    final ArrowBuf scratch(long bytes) {
        if (block == null || bytes > block.capacity() - blockUsed) {
            block = own(allocator.buffer(Math.max(bytes, BLOCK_BYTES)));
            blockUsed = 0;
        }
        ArrowBuf found = block.slice(blockUsed, bytes);
        blockUsed += bytes + Long.BYTES - 1 & -Long.BYTES;
        return found;
    }

    /** Private memory for `bytes` bytes, filled with zeros. */
    final ArrowBuf zeros(long bytes) {
        ArrowBuf found = scratch(bytes);
        found.setZero(0, bytes);
        return found;
    }

    /** A copy of the first `bytes` bytes of a buffer, which must be ascending offsets. */
    final ArrowBuf ascending(ArrowBuf buffer, long bytes, int width) {
        ArrowBuf copy = scratch(bytes);
        copy.setBytes(0, buffer, 0, bytes);
        long address = copy.memoryAddress();
        // If an offset is smaller than the one before, the sign of the difference remains: a loop without branches.
        long signs = 0;
        if (width == Integer.BYTES) {
            long before = 0;
            for (long at = address, until = address + bytes; at < until; at += Integer.BYTES) {
                long offset = Platform.getInt(null, at);
                signs |= offset - before;
                before = offset;
            }
        } else {
            long before = 0;
            for (long at = address, until = address + bytes; at < until; at += Long.BYTES) {
                long offset = Platform.getLong(null, at);
                signs |= offset | offset - before; // the difference of two non-negative numbers cannot overflow
                before = offset;
            }
        }
        if (signs < 0) {
            throw corrupt("offsets that do not ascend");
        }
        return copy;
    }

    private ArrowBuf own(ArrowBuf made) {
        owned.add(made);
        return made;
    }

    /** A chunk's payload as Arrow memory: it keeps the chunk's owner reachable, and frees nothing. */
    private static final class Lent extends ForeignAllocation {
        private final Object owner;

        Lent(Chunk chunk) {
            super(chunk.payloadBytes, chunk.payloadAddress);
            owner = chunk.owner;
        }

        @Override
        protected void release0() {
            Reference.reachabilityFence(owner);
        }
    }
}
