package kera.wire;

import java.util.concurrent.TimeUnit;

/** Points in time by {@link System#nanoTime}, which may only be compared by their difference. */
public final class Deadline {

    private static final long FOREVER_NANOS = 1L << 61;

    private Deadline() {
    }

    /** So many milliseconds, or for ever. */
    static long nanos(long ms) {
        return Math.min(TimeUnit.MILLISECONDS.toNanos(ms), FOREVER_NANOS);
    }

    public static long afterMs(long ms) {
        return System.nanoTime() + nanos(ms);
    }

    static long never() {
        return System.nanoTime() + FOREVER_NANOS;
    }

    /** Until then; 0 or less: it has passed. */
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
