package kera.spark.write;

import java.util.Arrays;

/**
 * How long a chunk may fill in a task that writes with {@code latencyTarget}: the same as {@code Filling} of
 * {@code writing/task.py}, which explains it.
 */
final class Filling {

    private static final double MARGIN = 0.1;
    private static final double LEFT = 0.5;
    private static final int LATEST = 32;
    private static final double SLACK = 1.0 / 8;

    private final double targetNanos;
    private final long[] tookNanos = new long[LATEST];
    private int stored;

    Filling(long targetMs) {
        targetNanos = targetMs * 1e6;
    }

    /** Record that a chunk was acknowledged {@code nanos} nanoseconds after it was sent. */
    void stored(long nanos) {
        tookNanos[stored++ % LATEST] = nanos;
        stored %= LATEST;
    }

    /** How long a chunk may fill, in nanoseconds. */
    long fillsNanos() {
        long worst = Arrays.stream(tookNanos).max().getAsLong();
        return (long) Math.max(targetNanos * (1 - MARGIN) - worst, targetNanos * LEFT);
    }

    /** A chunk that has been filling for this long is sent when the thread looks for due chunks. */
    long dueNanos() {
        return (long) (fillsNanos() * (1 - SLACK));
    }
}
