package kera.wire;

import java.util.Arrays;

import com.fasterxml.jackson.databind.JsonNode;

/** The number of keys or headers of each row; {@link Blobs#NULL} if the row's list is null. */
public final class Counts {

    private int[] counts = new int[1 << 6];
    private int rows;
    private int nulls;

    static Counts parse(JsonNode node) {
        Counts made = new Counts();
        made.counts = Numbers.ints(node);
        made.rows = made.counts.length;
        for (int count : made.counts) {
            made.nulls += count == Blobs.NULL ? 1 : 0;
        }
        return made;
    }

    public void add(int count) {
        if (rows == counts.length) {
            counts = Arrays.copyOf(counts, Math.max(1 << 6, 2 * rows));
        }
        counts[rows++] = count;
        if (count == Blobs.NULL) {
            nulls++;
        }
    }

    void clear() {
        rows = 0;
        nulls = 0;
    }

    int rows() {
        return rows;
    }

    int nulls() {
        return nulls;
    }

    int[] counts() {
        return counts;
    }
}
