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
 * The record batch in a chunk's payload, taken field by field in the order of the schema.
 *
 * <p>What says where its values are is read from a private copy, and every buffer that is given is a range of the
 * payload that was checked, or a copy. So whatever happens to the payload's bytes meanwhile, what is read stays inside
 * of it. What does not fit is a {@link KeraException} CorruptChunk, or an exception of flatbuffers, of a codec or of
 * Java's arrays that means the same.
 */
abstract class Body {
    /** What the buffers of one chunk may become together, and its values; the same as of the SDK. */
    private static final long DECOMPRESSED_BYTES_MAX = 128L << 20;
    /** How much longer than itself something compressed may say to be; neither codec can do more. */
    private static final long LZ4_RATIO_MAX = 256;
    private static final long ZSTD_RATIO_MAX = 32768;
    /** Small copies lie in blocks of so many bytes: to allocate costs more than to write them. */
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

    /** Begins with the first field of the batch in `chunk`, which must have as many rows as the chunk's header says. */
    abstract void open(Chunk chunk);

    /** The number of values of the next field, whose buffers are to be taken next. */
    abstract int node();

    /** How many values of the field of the last {@link #node} are null; to be asked after {@link #validity}. */
    abstract int nulls();

    /** The next buffer, the bits that say which of a field's `count` values there are; empty if that is all. */
    abstract ArrowBuf validity(int count);

    /** The next buffer, which must have `needed` bytes at least. */
    abstract ArrowBuf data(long needed);

    /**
     * The next buffer, the offsets of `count` values, as a copy that was checked to ascend; see {@link #end}.
     *
     * @param width of an offset: 4 or 8 bytes
     */
    abstract ArrowBuf offsets(int count, int width);

    /** How many buffers of data the next field of views has. */
    abstract int variadic();

    /** Passes over a field with all in it; returns the number of its values. */
    abstract int skip(SkippedField field);

    /** What is thrown for bytes that are not a record batch of the stream's schema. */
    abstract KeraException corrupt(String what);

    /** The last of `count` values' `offsets`. */
    static long end(ArrowBuf offsets, int count, int width) {
        return width == Integer.BYTES ? offsets.getInt((long) count * width) : offsets.getLong((long) count * width);
    }

    /** Bytes of a bit for each of `count` values. */
    static long bits(int count) {
        return (count + 7L) / 8;
    }

    /** How many of the `count` bits at `bits` are 0: values that are null. */
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
     * Counts what values take when each is written out, of which this is part: each a byte at least, also where it
     * takes none in the chunk, and those that lie in the same bytes all that they are. The rule is that of the SDK.
     */
    final void writeOut(long bytes) {
        writtenOutBytes += bytes;
        if (writtenOutBytes > room) {
            throw corrupt("its values would become more than " + room + " bytes when each is written out");
        }
    }

    /** What has been counted so. */
    final long writtenOut() {
        return writtenOutBytes;
    }

    /** Lets go of the chunk and of all copies. Columns that were loaded must not be read any more. */
    void release() {
        for (ArrowBuf each : owned) {
            each.close();
        }
        owned.clear();
        block = null;
    }

    /** The payload of `chunk`, which has a body of so many bytes. */
    final ArrowBuf begin(Chunk chunk, long bodyBytes, boolean compressed) {
        beginCounting(bodyBytes, compressed);
        return own(allocator.wrapForeignAllocation(new Lent(chunk)));
    }

    /** What is counted from here on is of a body of so many bytes. */
    final void beginCounting(long bodyBytes, boolean compressed) {
        decompressedBytes = 0;
        writtenOutBytes = 0;
        room = compressed ? DECOMPRESSED_BYTES_MAX : Math.max(DECOMPRESSED_BYTES_MAX, Byte.SIZE * bodyBytes);
    }

    /** What the `bytes` bytes at `at` become when they are decompressed, which must be `size` bytes. */
    final ArrowBuf decompressed(ArrowBuf payload, long at, long bytes, long size, boolean zstd) {
        if (size < 0 || size > Integer.MAX_VALUE || size > bytes * (zstd ? ZSTD_RATIO_MAX : LZ4_RATIO_MAX)) {
            throw corrupt(bytes + " bytes that would be " + size);
        }
        decompressedBytes += size;
        if (decompressedBytes > DECOMPRESSED_BYTES_MAX) {
            throw corrupt("its buffers would become more than " + DECOMPRESSED_BYTES_MAX + " bytes");
        }
        // Decompressed from a copy: codecs look at some bytes twice, and trust them not to change in between.
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
        if (found != size) { // an error is a number that no size is
            throw corrupt("a compressed buffer that is not " + size + " bytes");
        }
        return content;
    }

    /** Memory for `bytes` bytes, whatever is in it, that nobody else can change. */
    final ArrowBuf scratch(long bytes) {
        if (block == null || bytes > block.capacity() - blockUsed) {
            block = own(allocator.buffer(Math.max(bytes, BLOCK_BYTES)));
            blockUsed = 0;
        }
        ArrowBuf found = block.slice(blockUsed, bytes);
        blockUsed += bytes + Long.BYTES - 1 & -Long.BYTES;
        return found;
    }

    /** Such memory, with zeros. */
    final ArrowBuf zeros(long bytes) {
        ArrowBuf found = scratch(bytes);
        found.setZero(0, bytes);
        return found;
    }

    /** A copy of the first `bytes` bytes of a buffer, which must be offsets that ascend. */
    final ArrowBuf ascending(ArrowBuf buffer, long bytes, int width) {
        ArrowBuf copy = scratch(bytes);
        copy.setBytes(0, buffer, 0, bytes);
        long address = copy.memoryAddress();
        // Where one is smaller than the one before, the sign of the difference stays: a loop without branches.
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
                signs |= offset | offset - before; // of two that are not negative, the difference does not overflow
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

    /** A chunk's payload as memory of Arrow's: it keeps the chunk's owner reachable, and gives nothing back. */
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
