package kera.wire;

import java.util.Arrays;

import com.fasterxml.jackson.databind.JsonNode;

/**
 * Rows of a stream without its own schema, column by column, until they become a chunk.
 *
 * <p>To add a row, add a value; then, if rows have keys, the number of keys and the keys; then, if rows have headers,
 * the number of headers and their names and values; then call {@link #endRow}. Cleared rows can be filled again.
 */
public final class Rows {

    /** Maximum size of a row in a chunk besides its bytes: time, places and validity. */
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

    /** {@code timed}: rows have their own times; otherwise they get the time when they are written. */
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

    /** Parse the JSON form, see {@code rows_as_json} of {@code service/writes.py}. */
    static Rows parse(JsonNode node) {
        return new Rows(node);
    }

    /** Complete the row being added. {@code rowBytes} is its maximum size in a chunk. */
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

    /** The maximum size of the rows in a chunk. */
    public long bytes() {
        return bytes;
    }

    boolean timed() {
        return timed;
    }

    /** The time of each row, if the rows are {@link #timed}. */
    public long[] times() {
        return times;
    }
}
