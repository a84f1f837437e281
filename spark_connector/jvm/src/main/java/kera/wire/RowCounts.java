package kera.wire;

import java.nio.ByteBuffer;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.HashMap;
import java.util.Map;

/**
 * A multiset of rows, for the rare case that an earlier attempt stored them in another order. It remembers 16 bytes of
 * a hash for each row. The same as {@code RowCounts} of {@code writing/rows.py}.
 */
final class RowCounts {

    /** Rows stored by earlier attempts that have yet to come from Spark; each takes some 100 bytes of memory. */
    static final long ROWS_MAX = 1 << 24;

    private final Map<Digest, Integer> counts = new HashMap<>();
    private final MessageDigest digest;
    private long total;

    /** The first 16 bytes of a row's hash. */
    private record Digest(long high, long low) {
    }

    RowCounts() {
        try {
            digest = MessageDigest.getInstance("SHA-256");
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error); // every Java has it
        }
    }

    /** The number of rows. */
    long total() {
        return total;
    }

    /** Add all of {@code rows}. */
    void add(Rows rows) {
        RowWalk walk = new RowWalk(rows);
        while (walk.next()) {
            counts.merge(digest(walk), 1, Integer::sum);
        }
        total += rows.count();
    }

    /** Remove those of {@code rows} that are in the multiset; return the others, in their order. */
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
