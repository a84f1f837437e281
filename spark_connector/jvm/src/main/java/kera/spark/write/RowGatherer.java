package kera.spark.write;

import java.util.zip.CRC32C;

import kera.wire.Blobs;
import kera.wire.KeraException;
import kera.wire.Rows;
import kera.wire.WriteTarget;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeArrayData;
import org.apache.spark.sql.catalyst.expressions.UnsafeMapData;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Takes Spark's rows apart: finds the streamlet of a row, and the parts that become a record. The columns are those of
 * {@code RECORD_TYPES} in {@code writing/columns.py}, and have been checked.
 *
 * <p>Bytes are copied directly from Spark's memory; a row without lists of keys or headers needs no object.
 */
final class RowGatherer {

    private static final int NONE = -1;

    private final WriteTarget target;
    private final int keyless;
    private final int value;
    private final int key;
    private final int keys;
    private final int timestamp;
    private final int headers;
    private final int streamlet;
    private final boolean headersAreMap;
    private final StructType given;
    private final CRC32C crc = new CRC32C();
    private byte[] scratch = new byte[64];
    private UnsafeProjection projection;

    /** {@code keyless}: the streamlet of rows without a key. */
    RowGatherer(StructType given, WriteTarget target, int keyless) {
        this.given = given;
        this.target = target;
        this.keyless = keyless;
        value = ordinal("value");
        key = ordinal("key");
        keys = ordinal("keys");
        timestamp = ordinal("timestamp");
        headers = ordinal("headers");
        streamlet = ordinal("streamlet");
        headersAreMap = headers != NONE && given.apply(headers).dataType() instanceof MapType;
    }

    private int ordinal(String name) {
        return given.getFieldIndex(name).isDefined() ? given.fieldIndex(name) : NONE;
    }

    /** Whether the rows have a timestamp column. */
    boolean timed() {
        return timestamp != NONE;
    }

    /** The row in the form that the other methods take. */
    UnsafeRow unsafe(InternalRow row) {
        if (row instanceof UnsafeRow already) {
            return already;
        }
        if (projection == null) {
            projection = UnsafeProjection.create(given);
        }
        return projection.apply(row);
    }

    private static boolean has(UnsafeRow row, int column) {
        return column != NONE && !row.isNullAt(column);
    }

    // The place of a value in a row or an array: the offset from the base in the upper half, the length in the lower.

    private static int offset(long place) {
        return (int) (place >>> Integer.SIZE);
    }

    private static int length(long place) {
        return (int) place;
    }

    /** Maximum number of bytes that the row takes in a chunk. */
    long bytes(UnsafeRow row) {
        long bytes = Rows.ROW_BYTES;
        bytes += has(row, value) ? length(row.getLong(value)) : 0;
        bytes += has(row, key) ? length(row.getLong(key)) + Rows.KEY_BYTES : 0;
        bytes += has(row, keys) ? length(row.getLong(keys)) : 0; // Spark's memory has 8 extra bytes for each key
        return bytes + (has(row, headers) ? length(row.getLong(headers)) : 0); // and 16 or more for each header
    }

    /** The streamlet of the row. Throws StreamletOutOfRange if the row asks for one that the stream does not have. */
    int streamlet(UnsafeRow row) {
        if (has(row, streamlet)) {
            int wanted = row.getInt(streamlet);
            if (wanted < 0 || wanted >= target.streamlets()) {
                throw new KeraException("StreamletOutOfRange", "stream '" + target.stream() + "' has streamlets 0 to "
                        + (target.streamlets() - 1) + ", not " + wanted, false);
            }
            return wanted;
        }
        if (target.streamlets() == 1) {
            return 0;
        }
        if (has(row, key)) {
            return hashed(row.getBaseObject(), row.getBaseOffset(), row.getLong(key));
        }
        if (has(row, keys)) {
            UnsafeArrayData all = row.getArray(keys);
            if (all.numElements() > 0) {
                requireKey(all, 0);
                return hashed(all.getBaseObject(), all.getBaseOffset(), all.getLong(0));
            }
        }
        return keyless;
    }

    private int hashed(Object base, long baseOffset, long place) {
        crc.reset();
        long at = baseOffset + offset(place);
        if (base instanceof byte[] array) {
            crc.update(array, (int) (at - Platform.BYTE_ARRAY_OFFSET), length(place));
        } else {
            if (scratch.length < length(place)) {
                scratch = new byte[Math.max(length(place), 2 * scratch.length)];
            }
            Platform.copyMemory(base, at, scratch, Platform.BYTE_ARRAY_OFFSET, length(place));
            crc.update(scratch, 0, length(place));
        }
        return (int) (crc.getValue() % target.streamlets());
    }

    private static void requireKey(UnsafeArrayData keys, int index) {
        if (keys.isNullAt(index)) {
            throw mismatch("column 'keys' has a null among the keys of a row");
        }
    }

    private static KeraException mismatch(String message) {
        return new KeraException("SchemaMismatch", message, false);
    }

    /** Whether the row has a later epoch than all of {@code rows}, which is not empty and begins with its latest. */
    boolean beginsEpoch(UnsafeRow row, Rows rows) {
        long epochUs = target.epochUs();
        return epochUs > 0 && has(row, timestamp)
                && Math.floorDiv(row.getLong(timestamp), epochUs) > Math.floorDiv(rows.times()[0], epochUs);
    }

    /** Add the row to {@code to}; {@code bytes} is what {@link #bytes} returned for it. */
    void add(UnsafeRow row, long bytes, Rows to) {
        long timeUs = 0;
        if (timestamp != NONE) {
            if (row.isNullAt(timestamp)) {
                throw mismatch("stream '" + target.stream() + "': column 'timestamp' takes no nulls");
            }
            timeUs = row.getLong(timestamp);
        }
        Object base = row.getBaseObject();
        if (row.isNullAt(value)) {
            to.values.addNull();
        } else {
            long place = row.getLong(value);
            add(base, row.getBaseOffset() + offset(place), length(place), to.values);
        }
        if (keys != NONE) {
            addKeys(row, to);
        } else if (key != NONE) {
            to.keyCounts.add(addKey(row, to) ? 1 : Blobs.NULL);
        }
        if (headers != NONE) {
            addHeaders(row, to);
        }
        to.endRow(timeUs, bytes);
    }

    private boolean addKey(UnsafeRow row, Rows to) {
        if (!has(row, key)) {
            return false;
        }
        long place = row.getLong(key);
        add(row.getBaseObject(), row.getBaseOffset() + offset(place), length(place), to.keys);
        return true;
    }

    /** Add the keys of the row. If it also has a single key, this replaces the first of them. */
    private void addKeys(UnsafeRow row, Rows to) {
        UnsafeArrayData all = has(row, keys) ? row.getArray(keys) : null;
        boolean first = addKey(row, to);
        int count = all == null ? 0 : all.numElements();
        for (int each = 0; each < count; each++) {
            requireKey(all, each);
            if (each > 0 || !first) {
                add(all, each, to.keys);
            }
        }
        to.keyCounts.add(first ? Math.max(1, count) : all == null ? Blobs.NULL : count);
    }

    private static void add(UnsafeArrayData from, int index, Blobs to) {
        if (from.isNullAt(index)) {
            to.addNull();
        } else {
            long place = from.getLong(index);
            add(from.getBaseObject(), from.getBaseOffset() + offset(place), length(place), to);
        }
    }

    /** Add {@code length} bytes of an object or of off-heap memory, addressed as in Spark. */
    private static void add(Object base, long offset, int length, Blobs to) {
        if (base instanceof byte[] array) {
            to.add(array, (int) (offset - Platform.BYTE_ARRAY_OFFSET), length);
        } else {
            int place = to.add(length);
            Platform.copyMemory(base, offset, to.bytes(), Platform.BYTE_ARRAY_OFFSET + place, length);
        }
    }

    private void addHeaders(UnsafeRow row, Rows to) {
        if (row.isNullAt(headers)) {
            to.headerCounts.add(Blobs.NULL);
        } else if (headersAreMap) {
            UnsafeMapData map = row.getMap(headers);
            for (int each = 0; each < map.numElements(); each++) {
                long place = map.keyArray().getLong(each);
                addName(map.keyArray().getBaseObject(), map.keyArray().getBaseOffset(), place, to);
                add(map.valueArray(), each, to.headerValues);
            }
            to.headerCounts.add(map.numElements());
        } else {
            UnsafeArrayData all = row.getArray(headers);
            for (int each = 0; each < all.numElements(); each++) {
                UnsafeRow header = all.isNullAt(each) ? null : all.getStruct(each, 2);
                if (header == null || header.isNullAt(0)) {
                    throw mismatch("column 'headers' has a header without a key");
                }
                addName(header.getBaseObject(), header.getBaseOffset(), header.getLong(0), to);
                if (header.isNullAt(1)) {
                    to.headerValues.addNull();
                } else {
                    long place = header.getLong(1);
                    add(header.getBaseObject(), header.getBaseOffset() + offset(place), length(place), to.headerValues);
                }
            }
            to.headerCounts.add(all.numElements());
        }
    }

    private void addName(Object base, long baseOffset, long place, Rows to) {
        if (!UTF8String.fromAddress(base, baseOffset + offset(place), length(place)).isValid()) {
            throw mismatch("stream '" + target.stream() + "': column 'headers' has a key that is not UTF-8");
        }
        add(base, baseOffset + offset(place), length(place), to.headerNames);
    }
}
