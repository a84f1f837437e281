package kera.wire;

import java.util.concurrent.TimeUnit;

/** Points in time of {@link System#nanoTime}, which must be compared by their difference. */
public final class Deadline {

    private static final long FOREVER_NANOS = 1L << 61;

    private Deadline() {
    }

    /** {@code ms} in nanoseconds, or for ever if that is too large. */
    static long nanos(long ms) {
        return Math.min(TimeUnit.MILLISECONDS.toNanos(ms), FOREVER_NANOS);
    }

    public static long afterMs(long ms) {
        return System.nanoTime() + nanos(ms);
    }

    static long never() {
        return System.nanoTime() + FOREVER_NANOS;
    }

    /** The time left until {@code deadline}; 0 or less if it has passed. */
    public static long leftNanos(long deadline) {
        return deadline - System.nanoTime();
    }

    static boolean passed(long deadline) {
        return leftNanos(deadline) <= 0;
    }

    static long earlier(long one, long other) {
        return one - other < 0 ? one : other;
    }
}
