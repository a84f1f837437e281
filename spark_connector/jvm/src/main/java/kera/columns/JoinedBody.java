package kera.columns;

import java.util.ArrayList;
import java.util.List;
import kera.wire.Chunk;
import kera.wire.KeraException;
import org.apache.arrow.memory.ArrowBuf;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.vector.types.pojo.Schema;
import org.apache.spark.unsafe.Platform;

/**
 * The lean payloads of consecutive small chunks as one: their values are copied together, field by field. So Spark's
 * cost per batch and Arrow's cost per buffer are paid once for all of them, as in {@code kera.core.format.joining}.
 */
final class JoinedBody extends Body {
    private static final int RECORDS_MAX = 1 << 16;
    private static final int WRITTEN_OUT_BYTES_MAX = 256 << 10;

    /** A chunk, kept alive as long as its bytes are read, with its nodes: one for each of `fields`. */
    private record Part(Chunk chunk, long body, List<LeanNode> nodes) {
    }

    private final List<LeanField> schema;
    /** All fields, also nested ones, in the order of nodes. */
    private final List<LeanField> fields = new ArrayList<>();
    private final List<Part> parts = new ArrayList<>();
    private int next;
    private int here;
    private int nulls;
    private int records;
    private long writtenOutBytes;

    JoinedBody(BufferAllocator allocator, Schema schema) {
        super(allocator);
        this.schema = schema.getFields().stream().map(LeanField::ofColumn).toList();
        this.schema.forEach(this::flatten);
    }

    private void flatten(LeanField field) {
        fields.add(field);
        field.fields().forEach(this::flatten);
    }

    @Override
    KeraException corrupt(String what) {
        return LeanBody.corruptPayload(what);
    }

    @Override
    void open(Chunk chunk) {
        next = 0;
        records = 0;
        writtenOutBytes = 0;
        add(chunk);
    }

    /** Add another chunk; to be called before the first field is taken. */
    void add(Chunk chunk) {
        if (!chunk.isSmall()) {
            throw corrupt("it is not of a kind that is joined");
        }
        int nodesBytes = LeanBody.nodesBytes(chunk, Short.BYTES);
        long bodyAt = LeanBody.bodyAt(Short.BYTES, nodesBytes);
        long bodyBytes = chunk.payloadBytes - bodyAt;
        LeanBody.requireRecords(chunk.recordCount, bodyBytes);
        beginCounting(bodyBytes, false);
        byte[] prefix = new byte[nodesBytes];
        Platform.copyMemory(null, chunk.payloadAddress + Short.BYTES, prefix, Platform.BYTE_ARRAY_OFFSET, nodesBytes);
        List<LeanNode> nodes = LeanNodes.read(prefix, schema, chunk.recordCount, bodyBytes, this);
        parts.add(new Part(chunk, chunk.payloadAddress + bodyAt, nodes));
        records += chunk.recordCount;
        writtenOutBytes += Chunk.HEADER_BYTES + writtenOut();
    }

    /** Whether the chunks are enough for a batch. */
    boolean isFull() {
        return records >= RECORDS_MAX || writtenOutBytes >= WRITTEN_OUT_BYTES_MAX;
    }

    @Override
    int node() {
        here = next++;
        nulls = 0;
        int count = 0;
        for (Part part : parts) {
            LeanNode node = part.nodes.get(here);
            count = Math.addExact(count, node.count());
            if (node.form() == LeanNode.Form.NULLS) {
                nulls += node.count();
            } else if (node.validityAt() != LeanNode.NOWHERE) {
                nulls += zeroBits(part.body + node.validityAt(), node.count());
            }
        }
        return count;
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
        ArrowBuf found = zeros(bits(count));
        int at = 0;
        for (Part part : parts) {
            LeanNode node = part.nodes.get(here);
            if (node.form() != LeanNode.Form.NULLS) {
                boolean all = node.validityAt() == LeanNode.NOWHERE;
                putBits(found.memoryAddress(), at, all ? 0 : part.body + node.validityAt(), 0xFF, node.count());
            }
            at += node.count();
        }
        return found;
    }

    @Override
    ArrowBuf data(long needed) {
        LeanField field = fields.get(here);
        if (field.kind() == LeanField.Kind.BITS) {
            return bitValues(needed);
        }
        ArrowBuf found = scratch(needed);
        long at = found.memoryAddress();
        long end = at + needed;
        for (Part part : parts) {
            LeanNode node = part.nodes.get(here);
            boolean places = node.form().compareTo(LeanNode.Form.OFFSETS) >= 0;
            boolean text = places || node.form() == LeanNode.Form.NULLS && isText(field);
            long bytes = text ? node.dataBytes() : (long) node.count() * field.width();
            if (bytes > end - at) {
                throw corrupt("more than the " + needed + " bytes that its values need");
            }
            switch (node.form()) {
                case NULLS -> Platform.setMemory(at, (byte) 0, bytes);
                case ONE -> {
                    for (long to = at; to < at + bytes; to += field.width()) {
                        Platform.copyMemory(node.inline(), Platform.BYTE_ARRAY_OFFSET, null, to, field.width());
                    }
                }
                case DELTAS -> LeanBody.sum(node, part.body + node.packedAt(), at);
                default -> Platform.copyMemory(null, part.body + node.dataAt(), null, at, bytes);
            }
            at += bytes;
        }
        if (at != end) {
            throw corrupt("less than the " + needed + " bytes that its values need");
        }
        return found;
    }

    private static boolean isText(LeanField field) {
        return field.kind() != null && switch (field.kind()) {
            case BINARY, TEXT, LARGE_BINARY, LARGE_TEXT -> true;
            default -> false;
        };
    }

    private ArrowBuf bitValues(long needed) {
        ArrowBuf found = zeros(needed);
        int at = 0;
        for (Part part : parts) {
            LeanNode node = part.nodes.get(here);
            long from = node.form() == LeanNode.Form.PLAIN ? part.body + node.dataAt() : 0;
            int same = node.form() == LeanNode.Form.ONE ? node.inline()[0] & 0xFF : 0;
            putBits(found.memoryAddress(), at, from, same, node.count());
            at += node.count();
        }
        return found;
    }

    @Override
    ArrowBuf offsets(int count, int width) {
        ArrowBuf found = scratch((count + 1L) * width);
        long to = found.memoryAddress();
        LeanBody.put(to, 0, width, 0);
        int row = 1;
        long base = 0;
        for (Part part : parts) {
            LeanNode node = part.nodes.get(here);
            long total = node.form() == LeanNode.Form.NULLS ? 0 : node.total();
            if (width == Integer.BYTES && base + total > Integer.MAX_VALUE) {
                throw corrupt("values that are too long together");
            }
            putEnds(node, part.body + node.packedAt(), width, base, to + (long) row * width);
            row += node.count();
            base += total;
        }
        return found;
    }

    /** Write the end of each value of `node` from `to` on; the first value begins at `base`. */
    private void putEnds(LeanNode node, long from, int width, long base, long to) {
        int count = node.count();
        long same = node.form() == LeanNode.Form.SAME && count > 0 ? node.total() / count : 0;
        if (node.form() == LeanNode.Form.OFFSETS && offset(from, 0, width) != 0) {
            throw corrupt("offsets that do not begin with 0");
        }
        long end = 0;
        for (int row = 0; row < count; row++) {
            long before = end;
            end = switch (node.form()) {
                case OFFSETS -> offset(from, row + 1, width);
                case LENGTHS_1 -> end + LeanBody.unsigned(from, row, Byte.BYTES);
                case LENGTHS_2 -> end + LeanBody.unsigned(from, row, Short.BYTES);
                default -> end + same;
            };
            if (end < before) {
                throw corrupt("offsets that do not ascend");
            }
            LeanBody.put(to, row, width, base + end);
        }
        if (node.form() != LeanNode.Form.NULLS && end != node.total()) {
            throw corrupt("lengths that are " + end + " together, of " + node.total());
        }
    }

    private static long offset(long address, int at, int width) {
        return width == Integer.BYTES
                ? Platform.getInt(null, address + 4L * at)
                : Platform.getLong(null, address + 8L * at);
    }

    @Override
    int variadic() {
        return 0;
    }

    @Override
    int skip(SkippedField field) {
        int count = 0;
        for (Part part : parts) {
            count = Math.addExact(count, part.nodes.get(next).count());
        }
        next += field.nodes();
        return count;
    }

    @Override
    void release() {
        super.release();
        parts.clear();
    }

    // -- bits ------------------------------------------------------------------------------------------------------

    /** Write `count` bits to `to`, which is still 0 there, from bit `at` on; if `from` is 0, use the bits of `same`. */
    private static void putBits(long to, int at, long from, int same, int count) {
        int taken;
        for (int done = 0; done < count; done += taken) {
            int shift = (at + done) % Byte.SIZE;
            taken = Math.min(Byte.SIZE - shift, count - done);
            int found = (from == 0 ? same : bitsAt(from, done, count)) & (1 << taken) - 1;
            long place = to + (at + done) / Byte.SIZE;
            Platform.putByte(null, place, (byte) (Platform.getByte(null, place) | found << shift));
        }
    }

    /** The eight bits from bit `at` on, or fewer at the end of the `count` bits. */
    private static int bitsAt(long from, int at, int count) {
        long place = from + at / Byte.SIZE;
        int shift = at % Byte.SIZE;
        int found = (Platform.getByte(null, place) & 0xFF) >> shift;
        boolean more = shift > 0 && at / Byte.SIZE + 1 < bits(count);
        return more ? found | Platform.getByte(null, place + 1) << Byte.SIZE - shift : found;
    }
}
