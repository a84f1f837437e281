package kera.columns;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;

import kera.wire.KeraException;

/**
 * Reads the nodes of a lean payload once, and computes the place of each in the body; see
 * {@code kera.core.format.lean.layout}. If the payload has a single node for the nulls of nested fields, the result has
 * a node for each of these fields.
 */
final class LeanNodes {
    private static final int KIND_MASK = 0x1F;
    private static final int VALIDITY = 0x20;
    private static final int ENCODING_SHIFT = 6;
    private static final int PLAIN = 0;
    private static final int ONE = 1;
    private static final int DELTAS = 2;
    private static final int DEPTH_MAX = 64;
    private static final long VALUES_MAX = 1L << 40;
    private static final int VARINT_BYTES_MAX = 9;
    private static final LeanNode.Form[] PLACES = {
        LeanNode.Form.OFFSETS, LeanNode.Form.SAME, LeanNode.Form.LENGTHS_1, LeanNode.Form.LENGTHS_2
    };

    private final Body body;
    private final byte[] bytes;
    private final List<LeanNode> nodes = new ArrayList<>();
    private int at;
    private long end;

    private LeanNodes(Body body, byte[] bytes) {
        this.body = body;
        this.bytes = bytes;
    }

    /** The nodes in `bytes`, which must match `schema` and `bodyBytes`; `body` counts the size of their values. */
    static List<LeanNode> read(byte[] bytes, List<LeanField> schema, int records, long bodyBytes, Body body) {
        LeanNodes reader = new LeanNodes(body, bytes);
        for (LeanField field : schema) {
            reader.node(field, records, 0);
        }
        if (reader.at != bytes.length) {
            throw body.corrupt("more columns than the " + schema.size() + " of the schema");
        }
        if (reader.end != bodyBytes) {
            throw body.corrupt("its nodes are of a body of " + reader.end + " bytes, it has " + bodyBytes);
        }
        return reader.nodes;
    }

    private void node(LeanField field, long values, int depth) {
        int count = checked(values);
        if (depth > DEPTH_MAX) {
            throw body.corrupt("more than " + DEPTH_MAX + " nodes within each other");
        }
        int head = next() & 0xFF;
        int kind = head & KIND_MASK;
        boolean bits = (head & VALIDITY) != 0;
        boolean none = kind == LeanField.Kind.NULL.ordinal();
        if (none && head != kind) {
            throw body.corrupt("nulls with an encoding");
        }
        boolean matches = none || field.kind() != null && field.kind().ordinal() == kind;
        if (!matches) {
            throw body.corrupt("a node of kind " + kind + " where the schema has " + field.kind());
        }
        if (field.neverNull() && (bits || none && count > 0)) {
            throw body.corrupt("nulls among the keys or entries of a map");
        }
        if (none) {
            nulls(field, count);
            return;
        }
        long validityAt = bits ? place(Body.bits(count), 1) : LeanNode.NOWHERE;
        int encoding = head >> ENCODING_SHIFT;
        switch (field.kind()) {
            case BINARY, TEXT, LARGE_BINARY, LARGE_TEXT, LIST, LARGE_LIST ->
                places(field, count, validityAt, encoding, depth);
            case FIXED_LIST, STRUCT -> fields(field, count, validityAt, encoding, depth);
            default -> nodes.add(values(field, count, validityAt, encoding));
        }
    }

    /** Add nodes of nulls for the field and all nested fields; their values count as much as nulls take in Arrow. */
    private void nulls(LeanField field, int count) {
        nodes.add(LeanNode.nulls(count));
        boolean lists = field.kind() == LeanField.Kind.FIXED_LIST;
        body.writeOut((long) count * (lists ? 1 : Math.max(field.width(), 1)));
        long within = lists ? (long) count * field.width() : field.kind() == LeanField.Kind.STRUCT ? count : 0;
        for (LeanField each : field.fields()) {
            nulls(each, checked(within));
        }
    }

    private LeanNode values(LeanField field, int count, long validityAt, int encoding) {
        LeanField.Kind kind = field.kind();
        int width = field.width();
        if (kind == LeanField.Kind.FIXED && varint() != width) {
            throw body.corrupt("values of another width than " + width);
        }
        body.writeOut((long) count * Math.max(width, 1));
        boolean unaligned = kind == LeanField.Kind.FIXED || kind == LeanField.Kind.BITS;
        if (encoding == PLAIN) {
            long size = kind == LeanField.Kind.BITS ? Body.bits(count) : (long) count * width;
            return LeanNode.plain(count, validityAt, place(size, unaligned ? 1 : width), size);
        }
        if (encoding == ONE && kind != LeanField.Kind.FIXED) {
            byte[] value = take(width);
            if (kind == LeanField.Kind.BITS) {
                if (value[0] >> 1 != 0) {
                    throw body.corrupt("a bit that is " + value[0]);
                }
                value[0] = (byte) -value[0]; // the bit, eight times
            }
            return LeanNode.one(count, validityAt, value);
        }
        if (encoding == DELTAS && (kind == LeanField.Kind.FIXED_4 || kind == LeanField.Kind.FIXED_8)) {
            byte[] least = take(width);
            int delta = next();
            if (delta != 1 && delta != 2 && delta != 4 || delta >= width) {
                throw body.corrupt("deltas of " + delta + " bytes for values of " + width);
            }
            return LeanNode.deltas(count, validityAt, place((long) count * delta, delta), delta, least);
        }
        throw body.corrupt(kind + " with encoding " + encoding);
    }

    private void places(LeanField field, int count, long validityAt, int encoding, int depth) {
        int width = field.width();
        long total = varint();
        LeanNode.Form form = PLACES[encoding];
        if (width == Integer.BYTES && total > Integer.MAX_VALUE) {
            throw body.corrupt(field.kind() + " of " + total + " values");
        }
        if (form == LeanNode.Form.SAME && (count == 0 ? total : total % count) != 0) {
            throw body.corrupt(count + " values of the same length, " + total + " together");
        }
        long packedAt = switch (form) {
            case OFFSETS -> place((count + 1L) * width, width);
            case LENGTHS_1 -> place(count, Byte.BYTES);
            case LENGTHS_2 -> place((long) count * Short.BYTES, Short.BYTES);
            default -> 0;
        };
        body.writeOut((count + 1L) * width);
        if (field.fields().isEmpty()) {
            body.writeOut(total);
            nodes.add(LeanNode.places(count, form, validityAt, packedAt, place(total, 1), total, total));
        } else {
            nodes.add(LeanNode.places(count, form, validityAt, packedAt, 0, 0, total));
            node(field.fields().get(0), total, depth + 1);
        }
    }

    private void fields(LeanField field, int count, long validityAt, int encoding, int depth) {
        if (encoding != 0) {
            throw body.corrupt(field.kind() + " with encoding " + encoding);
        }
        long size = varint();
        boolean struct = field.kind() == LeanField.Kind.STRUCT;
        if (size != (struct ? field.fields().size() : field.width())) {
            throw body.corrupt(field.kind() + " of " + size + " where the schema has another number");
        }
        body.writeOut(count);
        nodes.add(LeanNode.plain(count, validityAt, 0, 0));
        for (LeanField each : field.fields()) {
            node(each, struct ? count : count * size, depth + 1);
        }
    }

    private int checked(long count) {
        if (count > Integer.MAX_VALUE - 1) {
            throw body.corrupt("a node of " + count + " values");
        }
        return (int) count;
    }

    private byte next() {
        if (at == bytes.length) {
            throw cutShort();
        }
        return bytes[at++];
    }

    private byte[] take(int size) {
        if (size > bytes.length - at) {
            throw cutShort();
        }
        at += size;
        return Arrays.copyOfRange(bytes, at - size, at);
    }

    private KeraException cutShort() {
        return body.corrupt("its nodes are cut short");
    }

    private long varint() {
        long number = 0;
        for (int shift = 0; shift < VARINT_BYTES_MAX * 7; shift += 7) {
            byte next = next();
            number |= (next & 0x7FL) << shift;
            if (next >= 0 && number <= VALUES_MAX) {
                return number;
            }
        }
        throw body.corrupt("a number that is too large");
    }

    private long place(long size, int width) {
        int step = Math.min(width, Long.BYTES);
        long here = end + step - 1 & -step;
        end = here + size;
        return here;
    }
}
