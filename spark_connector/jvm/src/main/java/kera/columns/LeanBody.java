package kera.columns;

import java.util.List;
import kera.wire.Chunk;
import kera.wire.KeraException;
import org.apache.arrow.memory.ArrowBuf;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.vector.BitVectorHelper;
import org.apache.arrow.vector.types.pojo.Schema;
import org.apache.spark.unsafe.Platform;

/**
 * The payload of a chunk of version 2, which is lean: see {@code kera.core.format.lean}. Plain values stay in place;
 * other encodings are written out for the fields that are read.
 */
final class LeanBody extends Body {
    private static final int RECORDS_WITHOUT_BYTES = 1 << 16;
    private static final int ALIGNMENT_BYTES = 8;
    private static final int NO_CODEC = 0;
    private static final int LZ4 = 1;
    private static final int ZSTD = 2;

    private final List<LeanField> schema;
    private List<LeanNode> nodes = List.of();
    private int next;
    private LeanNode node;
    private int nulls;
    /** The body, decompressed if it was compressed. */
    private ArrowBuf body;

    LeanBody(BufferAllocator allocator, Schema schema) {
        super(allocator);
        this.schema = schema.getFields().stream().map(LeanField::ofColumn).toList();
    }

    @Override
    KeraException corrupt(String what) {
        return corruptPayload(what);
    }

    static KeraException corruptPayload(String what) {
        return new KeraException("CorruptChunk", "chunk payload is not lean data of the schema: " + what, false);
    }

    @Override
    void open(Chunk chunk) {
        boolean compressed = chunk.codec != NO_CODEC;
        if (compressed && chunk.codec != LZ4 && chunk.codec != ZSTD) {
            throw corrupt("unknown compression");
        }
        int prefixBytes = Short.BYTES + (compressed ? Integer.BYTES : 0);
        int nodesBytes = nodesBytes(chunk, prefixBytes);
        long bodyAt = bodyAt(prefixBytes, nodesBytes);
        long stored = chunk.payloadBytes - bodyAt;
        long bodyBytes = compressed
                ? Integer.toUnsignedLong(Platform.getInt(null, chunk.payloadAddress + Short.BYTES))
                : stored;
        int records = chunk.recordCount;
        requireRecords(records, bodyBytes);
        ArrowBuf payload = begin(chunk, bodyBytes, compressed);
        byte[] prefix = new byte[nodesBytes];
        payload.getBytes(prefixBytes, prefix);
        nodes = LeanNodes.read(prefix, schema, records, bodyBytes, this);
        body = compressed
                ? decompressed(payload, bodyAt, stored, bodyBytes, chunk.codec == ZSTD)
                : payload.slice(bodyAt, bodyBytes);
        next = 0;
    }

    /** The size of the nodes after a prefix of `prefixBytes`, checked: the body begins within the payload. */
    static int nodesBytes(Chunk chunk, int prefixBytes) {
        if (chunk.payloadBytes < prefixBytes) {
            throw corruptPayload("it is cut short");
        }
        int nodesBytes = Platform.getShort(null, chunk.payloadAddress) & 0xFFFF;
        if (bodyAt(prefixBytes, nodesBytes) > chunk.payloadBytes) {
            throw corruptPayload("nodes of " + nodesBytes + " bytes, in " + chunk.payloadBytes);
        }
        return nodesBytes;
    }

    static long bodyAt(int prefixBytes, int nodesBytes) {
        return prefixBytes + nodesBytes + ALIGNMENT_BYTES - 1 & -ALIGNMENT_BYTES;
    }

    static void requireRecords(int records, long bodyBytes) {
        if (records < 0 || records > Math.max(RECORDS_WITHOUT_BYTES, Byte.SIZE * bodyBytes)) {
            throw corruptPayload(bodyBytes + " bytes that say to be " + Integer.toUnsignedString(records) + " records");
        }
    }

    @Override
    int node() {
        node = nodes.get(next++);
        nulls = switch (node.form()) {
            case NULLS -> node.count();
            default -> node.validityAt() == LeanNode.NOWHERE
                    ? 0
                    : BitVectorHelper.getNullCount(inPlace(node.validityAt(), bits(node.count())), node.count());
        };
        return node.count();
    }

    @Override
    int nulls() {
        return nulls;
    }

    @Override
    ArrowBuf validity(int count) {
        if (nulls == 0) {
            return allocator.getEmpty();
        }
        return node.form() == LeanNode.Form.NULLS ? zeros(bits(count)) : inPlace(node.validityAt(), bits(count));
    }

    @Override
    ArrowBuf data(long needed) {
        ArrowBuf found = switch (node.form()) {
            case NULLS -> zeros(needed);
            case ONE -> repeated(needed);
            case DELTAS -> summed();
            default -> inPlace(node.dataAt(), node.dataBytes());
        };
        if (found.capacity() < needed) {
            throw corrupt("a buffer of " + found.capacity() + " bytes that needs " + needed);
        }
        return found;
    }

    /** The single value of the node, repeated. */
    private ArrowBuf repeated(long bytes) {
        ArrowBuf found = scratch(bytes);
        if (bytes > 0) {
            found.setBytes(0, node.inline());
        }
        for (long done = node.inline().length; done < bytes; done *= 2) {
            found.setBytes(done, found, 0, Math.min(done, bytes - done));
        }
        return found;
    }

    private ArrowBuf summed() {
        ArrowBuf found = scratch((long) node.count() * node.inline().length);
        sum(node, inPlace(node.packedAt(), node.count() * node.total()).memoryAddress(), found.memoryAddress());
        return found;
    }

    /** Write the values of `node` from `to` on: its least value plus each of the deltas at `from`. */
    static void sum(LeanNode node, long from, long to) {
        int width = node.inline().length;
        int deltaBytes = (int) node.total();
        if (width == Integer.BYTES) {
            int least = Platform.getInt(node.inline(), Platform.BYTE_ARRAY_OFFSET);
            for (int row = 0; row < node.count(); row++) {
                Platform.putInt(null, to + (long) row * width, least + (int) unsigned(from, row, deltaBytes));
            }
        } else {
            long least = Platform.getLong(node.inline(), Platform.BYTE_ARRAY_OFFSET);
            for (int row = 0; row < node.count(); row++) {
                Platform.putLong(null, to + (long) row * width, least + unsigned(from, row, deltaBytes));
            }
        }
    }

    @Override
    ArrowBuf offsets(int count, int width) {
        long bytes = (count + 1L) * width;
        ArrowBuf found = switch (node.form()) {
            case NULLS -> zeros(bytes);
            case OFFSETS -> ascending(inPlace(node.packedAt(), bytes), bytes, width);
            case SAME -> multiples(bytes, count, width);
            case LENGTHS_1 -> ends(bytes, count, width, Byte.BYTES);
            case LENGTHS_2 -> ends(bytes, count, width, Short.BYTES);
            default -> throw corrupt("values where the schema has none"); // LeanNodes has excluded this
        };
        if (end(found, 0, width) != 0 || end(found, count, width) != node.total()) {
            throw corrupt("offsets that do not go from 0 to " + node.total());
        }
        return found;
    }

    private ArrowBuf multiples(long bytes, int count, int width) {
        ArrowBuf found = scratch(bytes);
        long length = count == 0 ? 0 : node.total() / count;
        for (int row = 0; row <= count; row++) {
            put(found.memoryAddress(), row, width, row * length);
        }
        return found;
    }

    /** A 0, then the end of each value. */
    private ArrowBuf ends(long bytes, int count, int width, int lengthBytes) {
        long from = inPlace(node.packedAt(), (long) count * lengthBytes).memoryAddress();
        ArrowBuf found = scratch(bytes);
        long end = 0;
        put(found.memoryAddress(), 0, width, end);
        for (int row = 0; row < count; row++) {
            end += unsigned(from, row, lengthBytes);
            put(found.memoryAddress(), row + 1, width, end);
        }
        if (end != node.total()) {
            throw corrupt("lengths that are " + end + " together, of " + node.total());
        }
        return found;
    }

    static long unsigned(long address, int at, int width) {
        return switch (width) {
            case 1 -> Platform.getByte(null, address + at) & 0xFFL;
            case 2 -> Platform.getShort(null, address + 2L * at) & 0xFFFFL;
            default -> Platform.getInt(null, address + 4L * at) & 0xFFFF_FFFFL;
        };
    }

    static void put(long address, int at, int width, long number) {
        if (width == Integer.BYTES) {
            Platform.putInt(null, address + 4L * at, (int) number);
        } else {
            Platform.putLong(null, address + 8L * at, number);
        }
    }

    private ArrowBuf inPlace(long at, long bytes) {
        return bytes == 0 ? allocator.getEmpty() : body.slice(at, bytes);
    }

    @Override
    int variadic() {
        return 0;
    }

    @Override
    int skip(SkippedField field) {
        int count = nodes.get(next).count();
        next += field.nodes();
        return count;
    }

    @Override
    void release() {
        super.release();
        nodes = List.of();
        body = null;
    }
}
