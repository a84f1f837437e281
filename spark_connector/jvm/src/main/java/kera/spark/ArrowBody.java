package kera.spark;

import com.github.luben.zstd.Zstd;
import java.lang.ref.Reference;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import org.apache.arrow.flatbuf.BodyCompression;
import org.apache.arrow.flatbuf.BodyCompressionMethod;
import org.apache.arrow.flatbuf.Buffer;
import org.apache.arrow.flatbuf.CompressionType;
import org.apache.arrow.flatbuf.FieldNode;
import org.apache.arrow.flatbuf.Message;
import org.apache.arrow.flatbuf.MessageHeader;
import org.apache.arrow.flatbuf.RecordBatch;
import org.apache.arrow.memory.ArrowBuf;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.memory.ForeignAllocation;
import org.apache.spark.unsafe.Platform;

/**
 * The record batch in a chunk's payload, taken field by field in the order of the schema.
 *
 * <p>Its metadata are read from a private copy, and every buffer that is given is a range of the payload that was
 * checked, or a copy. So whatever happens to the payload's bytes meanwhile, what is read stays inside of it. What does
 * not fit is a {@link KeraException} CorruptChunk, or an exception of flatbuffers or of a codec that means the same.
 */
final class ArrowBody {
    private static final int PREFIX_BYTES = 8;
    private static final int CONTINUATION = -1;
    private static final int UNCOMPRESSED = -1;
    /** How much longer than itself a compressed buffer may say to be; neither codec can do more. */
    private static final long LZ4_RATIO_MAX = 256;
    private static final long ZSTD_RATIO_MAX = 32768;
    /** What the buffers of one chunk may become together, and its values; the same as of the SDK. */
    private static final long DECOMPRESSED_BYTES_MAX = 128L << 20;

    private final BufferAllocator allocator;
    private final List<ArrowBuf> owned = new ArrayList<>();
    private final Message message = new Message();
    private final RecordBatch batch = new RecordBatch();
    private final FieldNode node = new FieldNode();
    private final Buffer buffer = new Buffer();
    private byte[] metadata = new byte[1024];
    private ArrowBuf payload;
    private boolean compressed;
    private boolean zstd;
    private long start;
    private long length;
    private int nodes;
    private int buffers;
    private int variadics;
    private int nodesThere;
    private int buffersThere;
    private int variadicsThere;
    private int nulls;
    private long decompressedBytes;
    private long writtenOutBytes;
    private long room;

    ArrowBody(BufferAllocator allocator) {
        this.allocator = allocator;
    }

    /** What is thrown for bytes that are no record batch of the stream's schema. */
    static KeraException corrupt(String what) {
        return new KeraException("CorruptChunk", "chunk payload is no Arrow record batch of the expected schema: "
                + what, false);
    }

    /** Begins with the first field of the batch in `chunk`, which must have as many rows as the chunk's header says. */
    void open(Chunk chunk) {
        long address = chunk.payloadAddress;
        int metadataBytes = chunk.payloadBytes < PREFIX_BYTES || Platform.getInt(null, address) != CONTINUATION
                ? 0
                : Platform.getInt(null, address + Integer.BYTES);
        if (metadataBytes <= 0 || metadataBytes > chunk.payloadBytes - PREFIX_BYTES) {
            throw corrupt("no whole message");
        }
        if (metadata.length < metadataBytes) {
            metadata = new byte[metadataBytes];
        }
        Platform.copyMemory(null, address + PREFIX_BYTES, metadata, Platform.BYTE_ARRAY_OFFSET, metadataBytes);
        Message.getRootAsMessage(ByteBuffer.wrap(metadata, 0, metadataBytes), message);
        if (message.headerType() != MessageHeader.RecordBatch || message.header(batch) == null) {
            throw corrupt("another kind of message");
        }
        start = PREFIX_BYTES + metadataBytes;
        length = message.bodyLength();
        if (length < 0 || length > chunk.payloadBytes - start) {
            throw corrupt("a body of " + length + " bytes");
        }
        if (batch.length() != chunk.recordCount) {
            throw corrupt(batch.length() + " records, " + chunk.recordCount + " in the header");
        }
        useCodec(batch.compression());
        decompressedBytes = 0;
        writtenOutBytes = 0;
        room = compressed ? DECOMPRESSED_BYTES_MAX : Math.max(DECOMPRESSED_BYTES_MAX, Byte.SIZE * length);
        nodes = 0;
        buffers = 0;
        variadics = 0;
        nodesThere = batch.nodesLength();
        buffersThere = batch.buffersLength();
        variadicsThere = batch.variadicBufferCountsLength();
        payload = own(allocator.wrapForeignAllocation(new Lent(chunk)));
    }

    private void useCodec(BodyCompression compression) {
        compressed = compression != null;
        zstd = compressed && compression.codec() == CompressionType.ZSTD;
        boolean known = zstd || compressed && compression.codec() == CompressionType.LZ4_FRAME;
        if (compressed && (!known || compression.method() != BodyCompressionMethod.BUFFER)) {
            throw corrupt("unknown compression");
        }
    }

    /** The number of values of the next field, whose buffers are to be taken next. */
    int node() {
        if (nodes >= nodesThere) {
            throw corrupt("too few fields");
        }
        batch.nodes(node, nodes++);
        long count = node.length();
        if (count < 0 || count > Integer.MAX_VALUE - 1 || node.nullCount() < 0 || node.nullCount() > count) {
            throw corrupt("a field of " + count + " values, " + node.nullCount() + " of them null");
        }
        nulls = (int) node.nullCount();
        writeOut(count);
        return (int) count;
    }

    /**
     * Counts what values take when each is written out, of which this is part: each a byte at least, also where it
     * takes none in the chunk, and those that lie in the same bytes all that they are. The rule is that of the SDK.
     */
    void writeOut(long bytes) {
        writtenOutBytes += bytes;
        if (writtenOutBytes > room) {
            throw corrupt("its values would become more than " + room + " bytes when each is written out");
        }
    }

    /** How many values of the field of the last {@link #node} are null. */
    int nulls() {
        return nulls;
    }

    /** The next buffer, the bits that say which of a field's `count` values there are; empty if that is all. */
    ArrowBuf validity(int count) {
        if (nulls == 0) {
            buffers++;
            return allocator.getEmpty();
        }
        return data((count + 7L) / 8);
    }

    /** The next buffer, which must have `needed` bytes at least. */
    ArrowBuf data(long needed) {
        if (buffers >= buffersThere) {
            throw corrupt("too few buffers");
        }
        batch.buffers(buffer, buffers++);
        long offset = buffer.offset();
        long bytes = buffer.length();
        if (offset < 0 || bytes < 0 || offset > length || bytes > length - offset) {
            throw corrupt(bytes + " bytes at " + offset + " of a body of " + length);
        }
        ArrowBuf found = bytes == 0
                ? allocator.getEmpty()
                : compressed ? decompressed(start + offset, bytes) : payload.slice(start + offset, bytes);
        if (found.capacity() < needed) {
            throw corrupt("a buffer of " + found.capacity() + " bytes that needs " + needed);
        }
        return found;
    }

    private ArrowBuf decompressed(long at, long bytes) {
        if (bytes < Long.BYTES) {
            throw corrupt("a compressed buffer of " + bytes + " bytes");
        }
        long size = payload.getLong(at);
        if (size == UNCOMPRESSED) {
            return payload.slice(at + Long.BYTES, bytes - Long.BYTES);
        }
        if (size < 0 || size > Integer.MAX_VALUE || size > bytes * (zstd ? ZSTD_RATIO_MAX : LZ4_RATIO_MAX)) {
            throw corrupt(bytes + " bytes that would be " + size);
        }
        decompressedBytes += size;
        if (decompressedBytes > DECOMPRESSED_BYTES_MAX) {
            throw corrupt("its buffers would become more than " + DECOMPRESSED_BYTES_MAX + " bytes");
        }
        // Decompressed from a copy: codecs look at some bytes twice, and trust them not to change in between.
        byte[] copy = new byte[(int) bytes - Long.BYTES];
        payload.getBytes(at + Long.BYTES, copy);
        byte[] content = zstd ? unpacked(copy, (int) size) : Lz4Frame.decompressed(copy, (int) size);
        ArrowBuf made = own(allocator.buffer(size)).capacity(size); // Arrow rounds up, and what is behind is anything
        made.setBytes(0, content);
        return made;
    }

    private static byte[] unpacked(byte[] frame, int size) {
        byte[] content = new byte[size];
        long found = Zstd.decompress(content, frame);
        if (found != size) { // an error is a number that no size is
            throw corrupt("a compressed buffer that is not " + size + " bytes");
        }
        return content;
    }

    /** A copy of the first `bytes` bytes of `buffer` that nobody else can change. */
    ArrowBuf copied(ArrowBuf buffer, long bytes) {
        ArrowBuf copy = own(allocator.buffer(bytes));
        copy.setBytes(0, buffer, 0, bytes);
        return copy;
    }

    /**
     * The next buffer, the offsets of `count` values, as a copy that was checked to ascend; see {@link #end}.
     *
     * @param width of an offset: 4 or 8 bytes
     */
    ArrowBuf offsets(int count, int width) {
        if (count == 0) { // then it may be empty
            ArrowBuf none = own(allocator.buffer(width));
            none.setZero(0, width);
            buffers++;
            return none;
        }
        long bytes = (count + 1L) * width;
        ArrowBuf copy = copied(data(bytes), bytes);
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

    /** The last of `count` values' `offsets`. */
    static long end(ArrowBuf offsets, int count, int width) {
        return width == Integer.BYTES ? offsets.getInt((long) count * width) : offsets.getLong((long) count * width);
    }

    /** How many buffers of data the next field of views has. */
    int variadic() {
        if (variadics >= variadicsThere) {
            throw corrupt("too few counts of buffers");
        }
        long count = batch.variadicBufferCounts(variadics++);
        if (count < 0 || count > buffersThere) {
            throw corrupt(count + " buffers of a field");
        }
        return (int) count;
    }

    /** Passes over a field with all in it; returns the number of its values. */
    int skip(int nodesOf, int buffersOf, int views) {
        int count = node();
        nodes += nodesOf - 1;
        buffers += buffersOf;
        for (int view = 0; view < views; view++) {
            buffers += variadic();
        }
        return count;
    }

    /** Lets go of the chunk and of all copies. Columns that were loaded must not be read any more. */
    void release() {
        for (ArrowBuf each : owned) {
            each.close();
        }
        owned.clear();
        payload = null;
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
