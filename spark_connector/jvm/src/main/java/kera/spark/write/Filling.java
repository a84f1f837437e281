package kera.spark.write;

import java.util.Arrays;

/**
 * How long a chunk of a task may fill that writes with {@code latencyTarget}: as {@code writing/filling.py} says, where
 * it is explained.
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

    /** A chunk was acknowledged so long after it was closed. */
    void stored(long nanos) {
        tookNanos[stored++ % LATEST] = nanos;
        stored %= LATEST;
    }

    /** How long a chunk may fill. */
    long fillsNanos() {
        long worst = Arrays.stream(tookNanos).max().getAsLong();
        return (long) Math.max(targetNanos * (1 - MARGIN) - worst, targetNanos * LEFT);
    }

    /** A chunk goes that has been filled for so long, when it is looked at. */
    long dueNanos() {
        return (long) (fillsNanos() * (1 - SLACK));
    }
}
