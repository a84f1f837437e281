package kera.wire;

import java.util.Arrays;

import com.fasterxml.jackson.databind.JsonNode;

/**
 * Rows of a stream without a schema of its own, column by column, until they are a chunk.
 *
 * <p>Who adds a row adds a value, then, where rows have them at all, a number of keys and so many keys, a number of
 * headers and so many names and values, and ends it with {@link #endRow}. What is cleared can be filled again.
 */
public final class Rows {

    /** What a row takes in a chunk beside its bytes, at most: time, places, and whether it is there. */
    public static final int ROW_BYTES = 24;
    public static final int KEY_BYTES = 4;
    static final int HEADER_BYTES = 9;

    public final Blobs values;
    public final Counts keyCounts;
    public final Blobs keys;
    public final Counts headerCounts;
    public final Blobs headerNames;
    public final Blobs headerValues;
    private final boolean timed;
    private long[] times;
    private int count;
    private long bytes;

    /** {@code timed}: rows have times; else they are of the time when they are written. */
    Rows(boolean timed) {
        this.timed = timed;
        times = new long[timed ? 1 << 6 : 0];
        values = new Blobs();
        keyCounts = new Counts();
        keys = new Blobs();
        headerCounts = new Counts();
        headerNames = new Blobs();
        headerValues = new Blobs();
    }

    private Rows(JsonNode node) {
        timed = !node.get("times").isNull();
        times = timed ? Numbers.longs(node.get("times")) : new long[0];
        values = Blobs.parse(node.get("values"));
        keyCounts = Counts.parse(node.get("key_counts"));
        keys = Blobs.parse(node.get("keys"));
        headerCounts = Counts.parse(node.get("header_counts"));
        headerNames = Blobs.parse(node.get("header_names"));
        headerValues = Blobs.parse(node.get("header_values"));
        count = node.get("count").asInt();
    }

    /** From their JSON, see {@code rows_as_json} of {@code service/writes.py}. */
    static Rows parse(JsonNode node) {
        return new Rows(node);
    }

    /** The row that was added last is complete. {@code rowBytes} is what it takes in a chunk, at most. */
    public void endRow(long timeUs, long rowBytes) {
        if (timed) {
            if (count == times.length) {
                times = Arrays.copyOf(times, Math.max(1 << 6, 2 * count));
            }
            times[count] = timeUs;
        }
        count++;
        bytes += rowBytes;
    }

    void clear() {
        values.clear();
        keyCounts.clear();
        keys.clear();
        headerCounts.clear();
        headerNames.clear();
        headerValues.clear();
        count = 0;
        bytes = 0;
    }

    public int count() {
        return count;
    }

    /** What the rows take in a chunk, at most. */
    public long bytes() {
        return bytes;
    }

    boolean timed() {
        return timed;
    }

    /** Of each row, if they are {@link #timed}. */
    public long[] times() {
        return times;
    }
}
