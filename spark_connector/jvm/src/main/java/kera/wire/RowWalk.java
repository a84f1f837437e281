package kera.wire;

import java.nio.ByteBuffer;
import java.security.MessageDigest;
import java.util.Arrays;

/** Iterates over {@link Rows} row by row, to compare, hash or copy rows. */
final class RowWalk {

    private final Rows rows;
    private final Place value;
    private final Place key;
    private final Place headerName;
    private final Place headerValue;
    private int row = -1;

    /** The place of a walk in a column of bytes. */
    private static final class Place {
        private final Blobs blobs;
        private int index;
        private int at;

        Place(Blobs blobs) {
            this.blobs = blobs;
        }

        int length() {
            return blobs.lengths()[index];
        }

        void pass(int count) {
            for (int each = 0; each < count; each++) {
                at += Math.max(0, blobs.lengths()[index++]);
            }
        }

        /** Whether the next {@code count} values equal those of another place. */
        boolean isSame(Place other, int count) {
            int bytes = 0;
            for (int each = 0; each < count; each++) {
                int length = blobs.lengths()[index + each];
                if (length != other.blobs.lengths()[other.index + each]) {
                    return false;
                }
                bytes += Math.max(0, length);
            }
            return Arrays.equals(blobs.bytes(), at, at + bytes, other.blobs.bytes(), other.at, other.at + bytes);
        }

        void digest(MessageDigest into, int count) {
            int from = at;
            for (int each = 0; each < count; each++) {
                int length = blobs.lengths()[index + each];
                number(into, length);
                into.update(blobs.bytes(), from, Math.max(0, length));
                from += Math.max(0, length);
            }
        }

        /** Add the next {@code count} values to {@code to}; return their size in bytes. */
        int copy(Blobs to, int count) {
            int from = at;
            for (int each = 0; each < count; each++) {
                int length = blobs.lengths()[index + each];
                if (length == Blobs.NULL) {
                    to.addNull();
                } else {
                    to.add(blobs.bytes(), from, length);
                    from += length;
                }
            }
            return from - at;
        }
    }

    RowWalk(Rows rows) {
        this.rows = rows;
        value = new Place(rows.values);
        key = new Place(rows.keys);
        headerName = new Place(rows.headerNames);
        headerValue = new Place(rows.headerValues);
    }

    /** Move to the next row, initially to the first; return whether there is one. */
    boolean next() {
        if (row >= 0) {
            value.pass(1);
            key.pass(Math.max(0, keys()));
            headerName.pass(Math.max(0, headers()));
            headerValue.pass(Math.max(0, headers()));
        }
        return ++row < rows.count();
    }

    private int keys() {
        return of(rows.keyCounts);
    }

    private int headers() {
        return of(rows.headerCounts);
    }

    private int of(Counts counts) {
        return counts.rows() == 0 ? Blobs.NULL : counts.counts()[row];
    }

    /** Whether the current rows of both walks are equal. */
    boolean isSame(RowWalk other) {
        return (!rows.timed() || rows.times()[row] == other.rows.times()[other.row])
                && keys() == other.keys()
                && headers() == other.headers()
                && value.isSame(other.value, 1)
                && key.isSame(other.key, Math.max(0, keys()))
                && headerName.isSame(other.headerName, Math.max(0, headers()))
                && headerValue.isSame(other.headerValue, Math.max(0, headers()));
    }

    /** Put everything in the row into a hash. */
    void digest(MessageDigest into) {
        if (rows.timed()) {
            into.update(ByteBuffer.allocate(Long.BYTES).putLong(0, rows.times()[row]));
        }
        number(into, keys());
        number(into, headers());
        value.digest(into, 1);
        key.digest(into, Math.max(0, keys()));
        headerName.digest(into, Math.max(0, headers()));
        headerValue.digest(into, Math.max(0, headers()));
    }

    private static void number(MessageDigest into, int number) {
        into.update(ByteBuffer.allocate(Integer.BYTES).putInt(0, number));
    }

    /** Add the row to {@code to}. */
    void copy(Rows to) {
        int keys = Math.max(0, keys());
        int headers = Math.max(0, headers());
        long bytes = Rows.ROW_BYTES + keys * Rows.KEY_BYTES + headers * Rows.HEADER_BYTES;
        bytes += value.copy(to.values, 1);
        if (rows.keyCounts.rows() != 0) {
            to.keyCounts.add(keys());
            bytes += key.copy(to.keys, keys);
        }
        if (rows.headerCounts.rows() != 0) {
            to.headerCounts.add(headers());
            bytes += headerName.copy(to.headerNames, headers) + headerValue.copy(to.headerValues, headers);
        }
        to.endRow(rows.timed() ? rows.times()[row] : 0, bytes);
    }

    /** The rows of {@code all} from number {@code first} on. */
    static Rows from(Rows all, int first) {
        Rows rest = new Rows(all.timed());
        RowWalk walk = new RowWalk(all);
        while (walk.next()) {
            if (walk.row >= first) {
                walk.copy(rest);
            }
        }
        return rest;
    }

    /** Whether {@code all} begins with {@code first}. */
    static boolean begins(Rows all, Rows first) {
        if (first.count() > all.count()) {
            return false;
        }
        RowWalk one = new RowWalk(all);
        RowWalk other = new RowWalk(first);
        while (other.next()) {
            one.next();
            if (!one.isSame(other)) {
                return false;
            }
        }
        return true;
    }
}
