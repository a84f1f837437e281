package kera.wire;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/**
 * Encodes rows as lean payloads, see {@code docs/format.md}: byte for byte the same as those of
 * {@code kera.core.format.lean.encode}. Belongs to one thread.
 */
final class LeanEncoder {

    /** Columns with more values are not packed, so that readers can read them in place. */
    private static final int PACKED_VALUES_MAX = 1024;
    /** Maximum size of all nodes of the four columns, with everything before and between them. */
    private static final int OVERHEAD_BYTES = 256;

    private static final int NULL = 0;
    private static final int FIXED_8 = 5;
    private static final int BINARY = 8;
    private static final int TEXT = 9;
    private static final int LIST = 12;
    private static final int STRUCT = 15;
    private static final int VALIDITY = 0x20;
    private static final int ENCODING_SHIFT = 6;
    private static final int ONE = 1;
    private static final int DELTAS = 2;
    private static final int OFFSETS = 0;
    private static final int SAME = 1;
    private static final int LENGTHS_1 = 2;
    private static final int LENGTHS_2 = 3;

    private final ByteBuffer nodes = ByteBuffer.allocate(OVERHEAD_BYTES).order(ByteOrder.LITTLE_ENDIAN);
    private ByteBuffer out;
    private int bodyAt;
    /** The uncompressed payload, if it is to be compressed. */
    private ByteBuffer plain = ByteBuffer.allocate(0);
    /** The range of times of the rows that were encoded last. */
    private long timeMin;
    private long timeMax;

    long timeMin() {
        return timeMin;
    }

    long timeMax() {
        return timeMax;
    }

    /** The maximum size of the payload of rows that have {@code bytes} bytes. */
    static long bound(long bytes, int codec) {
        long plain = bytes + OVERHEAD_BYTES;
        return codec == Compression.NONE ? plain : Compression.bound(plain);
    }

    /** Put the payload of {@code rows} at the position of {@code into}; rows without times get {@code nowUs}. */
    void encode(Rows rows, long nowUs, int codec, ByteBuffer into) {
        if (codec == Compression.NONE) {
            encode(rows, nowUs, into);
            return;
        }
        long room = rows.bytes() + OVERHEAD_BYTES;
        if (plain.capacity() < room) {
            plain = ByteBuffer.allocate(Math.toIntExact(room)).order(ByteOrder.LITTLE_ENDIAN);
        }
        encode(rows, nowUs, plain.clear());
        int bodyBytes = plain.position() - bodyAt;
        int start = into.position();
        into.putShort((short) nodes.limit()).putInt(bodyBytes).put(nodes.rewind());
        while ((into.position() - start & 7) != 0) {
            into.put((byte) 0);
        }
        Compression.compress(codec, plain.array(), bodyAt, bodyBytes, into);
    }

    private void encode(Rows rows, long nowUs, ByteBuffer into) {
        out = into;
        measure(rows, nowUs);
        nodes.clear();
        int times = timesNode(rows);
        int keyLists = listNode(rows.keyCounts, rows.keys.count());
        int keys = keyLists == NULL ? NULL : blobsNode(rows.keys, BINARY);
        int values = blobsNode(rows.values, BINARY);
        int headerLists = listNode(rows.headerCounts, rows.headerNames.count());
        int names = NULL;
        int contents = NULL;
        if (headerLists != NULL) {
            nodes.put((byte) STRUCT).put((byte) 2);
            names = blobsNode(rows.headerNames, TEXT);
            contents = blobsNode(rows.headerValues, BINARY);
        }
        nodes.flip();
        int start = out.position();
        out.putShort((short) nodes.limit()).put(nodes);
        while ((out.position() - start & 7) != 0) {
            out.put((byte) 0);
        }
        bodyAt = out.position();
        putTimes(rows, times);
        putPlaces(rows.keyCounts.counts(), rows.keyCounts.rows(), keyLists);
        putBlobs(rows.keys, keys);
        putBlobs(rows.values, values);
        putPlaces(rows.headerCounts.counts(), rows.headerCounts.rows(), headerLists);
        putBlobs(rows.headerNames, names);
        putBlobs(rows.headerValues, contents);
    }

    private void measure(Rows rows, long nowUs) {
        timeMin = nowUs;
        timeMax = nowUs;
        if (rows.timed()) {
            long[] times = rows.times();
            timeMin = times[0];
            timeMax = times[0];
            for (int row = 1; row < rows.count(); row++) {
                timeMin = Math.min(timeMin, times[row]);
                timeMax = Math.max(timeMax, times[row]);
            }
        }
    }

    // -- nodes: each method returns what selects how the node's buffers are put, mostly the node's first byte ------

    private int timesNode(Rows rows) {
        if (timeMin == timeMax) {
            nodes.put((byte) (FIXED_8 | ONE << ENCODING_SHIFT)).putLong(timeMin);
            return ONE;
        }
        long span = timeMax - timeMin;
        int bytes = 0 <= span && span <= 0xFF ? 1 : 0 <= span && span <= 0xFFFF ? 2
                : 0 <= span && span <= 0xFFFF_FFFFL ? 4 : 8;
        if (rows.count() <= PACKED_VALUES_MAX && bytes < 8) {
            nodes.put((byte) (FIXED_8 | DELTAS << ENCODING_SHIFT)).putLong(timeMin).put((byte) bytes);
            return bytes << ENCODING_SHIFT | DELTAS;
        }
        nodes.put((byte) FIXED_8);
        return 0;
    }

    private int listNode(Counts counts, int total) {
        return counts.nulls() == counts.rows() ? putNode(NULL)
                : putNode(LIST | flags(counts.nulls()) | places(counts.counts(), counts.rows()), total);
    }

    private int blobsNode(Blobs blobs, int kind) {
        return blobs.count() > 0 && blobs.nulls() == blobs.count() ? putNode(NULL)
                : putNode(kind | flags(blobs.nulls()) | places(blobs.lengths(), blobs.count()), blobs.size());
    }

    private static int flags(int nulls) {
        return nulls == 0 ? 0 : VALIDITY;
    }

    private static int places(int[] lengths, int count) {
        int least = count == 0 ? 0 : Integer.MAX_VALUE;
        int most = 0;
        for (int each = 0; each < count; each++) {
            int length = Math.max(0, lengths[each]);
            least = Math.min(least, length);
            most = Math.max(most, length);
        }
        int encoding = least == most ? SAME
                : count <= PACKED_VALUES_MAX && most <= 0xFF ? LENGTHS_1
                : count <= PACKED_VALUES_MAX && most <= 0xFFFF ? LENGTHS_2 : OFFSETS;
        return encoding << ENCODING_SHIFT;
    }

    private int putNode(int node) {
        nodes.put((byte) node);
        return node;
    }

    private int putNode(int node, int size) {
        nodes.put((byte) node);
        int rest = size;
        while (rest > 0x7F) {
            nodes.put((byte) (rest & 0x7F | 0x80));
            rest >>>= 7;
        }
        nodes.put((byte) rest);
        return node;
    }

    // -- buffers ---------------------------------------------------------------------------------------------------

    private void align(int bytes) {
        while ((out.position() - bodyAt & bytes - 1) != 0) {
            out.put((byte) 0);
        }
    }

    private void putTimes(Rows rows, int how) {
        if (how == ONE) {
            return;
        }
        int bytes = how == 0 ? 8 : how >>> ENCODING_SHIFT;
        long least = how == 0 ? 0 : timeMin;
        align(bytes);
        for (int row = 0; row < rows.count(); row++) {
            long time = rows.times()[row] - least;
            switch (bytes) {
                case 1 -> out.put((byte) time);
                case 2 -> out.putShort((short) time);
                case 4 -> out.putInt((int) time);
                default -> out.putLong(time);
            }
        }
    }

    private void putBlobs(Blobs blobs, int node) {
        if (node != NULL) {
            putPlaces(blobs.lengths(), blobs.count(), node);
            out.put(blobs.bytes(), 0, blobs.size());
        }
    }

    /** Put the validity bits, if the node has any, and the places of the values; nothing for a {@link #NULL} node. */
    private void putPlaces(int[] lengths, int count, int node) {
        if (node == NULL) {
            return;
        }
        if ((node & VALIDITY) != 0) {
            putValidity(lengths, count);
        }
        switch (node >>> ENCODING_SHIFT) {
            case LENGTHS_1 -> {
                for (int each = 0; each < count; each++) {
                    out.put((byte) Math.max(0, lengths[each]));
                }
            }
            case LENGTHS_2 -> {
                align(Short.BYTES);
                for (int each = 0; each < count; each++) {
                    out.putShort((short) Math.max(0, lengths[each]));
                }
            }
            case OFFSETS -> {
                align(Integer.BYTES);
                int offset = 0;
                out.putInt(0);
                for (int each = 0; each < count; each++) {
                    offset += Math.max(0, lengths[each]);
                    out.putInt(offset);
                }
            }
            default -> { } // SAME: the total gives the length of each
        }
    }

    private void putValidity(int[] lengths, int count) {
        for (int first = 0; first < count; first += Byte.SIZE) {
            int bits = 0;
            for (int each = first; each < Math.min(count, first + Byte.SIZE); each++) {
                bits |= lengths[each] == Blobs.NULL ? 0 : 1 << each - first;
            }
            out.put((byte) bits);
        }
    }
}
