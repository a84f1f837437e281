package kera.wire;

import java.nio.ByteBuffer;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.HashMap;
import java.util.Map;

/**
 * Rows as a multiset, for the rare case that an earlier attempt has stored them in another order: each is remembered by
 * 16 bytes of a hash. The same as {@code RowCounts} of {@code writing/rows.py}.
 */
final class RowCounts {

    /** Rows stored by earlier attempts that have yet to come from Spark; each takes some 100 bytes of memory. */
    static final long ROWS_MAX = 1 << 24;

    private final Map<Digest, Integer> counts = new HashMap<>();
    private final MessageDigest digest;
    private long total;

    /** What stands for a row. */
    private record Digest(long high, long low) {
    }

    RowCounts() {
        try {
            digest = MessageDigest.getInstance("SHA-256");
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error); // every Java has it
        }
    }

    /** How many rows it has. */
    long total() {
        return total;
    }

    /** Put in all of {@code rows}. */
    void add(Rows rows) {
        RowWalk walk = new RowWalk(rows);
        while (walk.next()) {
            counts.merge(digest(walk), 1, Integer::sum);
        }
        total += rows.count();
    }

    /** Take out those of {@code rows} that are in it; gives the others, in their order. */
    Rows take(Rows rows) {
        if (total == 0) {
            return rows;
        }
        Rows others = new Rows(rows.timed());
        RowWalk walk = new RowWalk(rows);
        while (walk.next()) {
            Digest row = digest(walk);
            Integer left = counts.get(row);
            if (left == null) {
                walk.copy(others);
                continue;
            }
            total--;
            if (left == 1) {
                counts.remove(row);
            } else {
                counts.put(row, left - 1);
            }
        }
        return others;
    }

    private Digest digest(RowWalk walk) {
        walk.digest(digest);
        ByteBuffer found = ByteBuffer.wrap(digest.digest());
        return new Digest(found.getLong(), found.getLong());
    }
}
