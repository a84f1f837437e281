package kera.columns;

import java.nio.ByteBuffer;
import kera.wire.Chunk;
import kera.wire.KeraException;
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
import org.apache.spark.unsafe.Platform;

/** The payload of a chunk of version 1: an Arrow message. */
final class ArrowBody extends Body {
    private static final int PREFIX_BYTES = 8;
    private static final int CONTINUATION = -1;
    private static final int UNCOMPRESSED = -1;
    private static final int UNKNOWN_NULLS = -1;

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

    ArrowBody(BufferAllocator allocator) {
        super(allocator);
    }

    @Override
    KeraException corrupt(String what) {
        return new KeraException("CorruptChunk", "chunk payload is not an Arrow record batch of the expected schema: "
                + what, false);
    }

    @Override
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
        nodes = 0;
        buffers = 0;
        variadics = 0;
        nodesThere = batch.nodesLength();
        buffersThere = batch.buffersLength();
        variadicsThere = batch.variadicBufferCountsLength();
        payload = begin(chunk, length, compressed);
    }

    private void useCodec(BodyCompression compression) {
        compressed = compression != null;
        zstd = compressed && compression.codec() == CompressionType.ZSTD;
        boolean known = zstd || compressed && compression.codec() == CompressionType.LZ4_FRAME;
        if (compressed && (!known || compression.method() != BodyCompressionMethod.BUFFER)) {
            throw corrupt("unknown compression");
        }
    }

    @Override
    int node() {
        if (nodes >= nodesThere) {
            throw corrupt("too few fields");
        }
        batch.nodes(node, nodes++);
        long count = node.length();
        if (count < 0 || count > Integer.MAX_VALUE - 1
                || node.nullCount() < UNKNOWN_NULLS || node.nullCount() > count) {
            throw corrupt("a field of " + count + " values, " + node.nullCount() + " of them null");
        }
        nulls = (int) node.nullCount();
        writeOut(count);
        return (int) count;
    }

    @Override
    int nulls() {
        return nulls;
    }

    @Override
    ArrowBuf validity(int count) {
        if (nulls == 0) {
            buffers++;
            return allocator.getEmpty();
        }
        ArrowBuf bits = data(bits(count));
        int found = zeroBits(bits.memoryAddress(), count);
        if (nulls != UNKNOWN_NULLS && nulls != found) {
            throw corrupt(found + " nulls, which are said to be " + nulls);
        }
        nulls = found;
        return bits;
    }

    @Override
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
        return size == UNCOMPRESSED
                ? payload.slice(at + Long.BYTES, bytes - Long.BYTES)
                : decompressed(payload, at + Long.BYTES, bytes - Long.BYTES, size, zstd);
    }

    @Override
    ArrowBuf offsets(int count, int width) {
        if (count == 0) { // then the buffer may be empty
            ArrowBuf there = data(0);
            if (there.capacity() > 0 && (there.capacity() < width || end(there, 0, width) < 0)) {
                throw corrupt("no values, and an offset that is none");
            }
            return zeros(width);
        }
        long bytes = (count + 1L) * width;
        return ascending(data(bytes), bytes, width);
    }

    @Override
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

    @Override
    int skip(SkippedField field) {
        int count = node();
        nodes += field.nodes() - 1;
        buffers += field.buffers();
        for (int view = 0; view < field.views(); view++) {
            buffers += variadic();
        }
        return count;
    }

    @Override
    void release() {
        super.release();
        payload = null;
    }
}
