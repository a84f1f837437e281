package kera.wire;

import java.util.ArrayDeque;
import java.util.Deque;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;

/**
 * A pool of idle connections by address and credentials: pieces are opened all the time, and most are small. At most
 * {@link #IDLE_MAX} connections of a kind are kept, and none is reused after {@link #IDLE_MS}.
 */
final class Pool<T extends Pool.Idle> {

    static final int IDLE_MAX = 8;
    static final long IDLE_MS = 10_000;

    /** A connection that can be kept. */
    interface Idle extends AutoCloseable {

        /** Whether the peer is still connected and has sent no unexpected data. */
        boolean usable();

        @Override
        void close();
    }

    /** A connection, and the time after which it is too old. */
    private record Kept<T>(T connection, long until) {
    }

    /** Closes old connections even if the pool is not used: a connection keeps a broker's memory mapped. */
    private static final ScheduledExecutorService SWEEPER = Executors.newSingleThreadScheduledExecutor(work -> {
        Thread thread = new Thread(work, "kera-idle-connections");
        thread.setDaemon(true);
        return thread;
    });

    private final Map<Object, Deque<Kept<T>>> kept = new HashMap<>();

    /** A usable connection, or null. */
    T take(Object kind) {
        while (true) {
            T found = poll(kind);
            if (found == null || found.usable()) {
                return found;
            }
            found.close();
        }
    }

    private synchronized T poll(Object kind) {
        closeOld();
        Deque<Kept<T>> idle = kept.get(kind);
        Kept<T> last = idle == null ? null : idle.pollLast();
        return last == null ? null : last.connection;
    }

    /** Keep a connection, or close it if there are enough of its kind. */
    synchronized void give(Object kind, T connection) {
        closeOld();
        Deque<Kept<T>> idle = kept.computeIfAbsent(kind, key -> new ArrayDeque<>());
        if (idle.size() >= IDLE_MAX) {
            connection.close();
        } else {
            idle.addLast(new Kept<>(connection, Deadline.afterMs(IDLE_MS)));
            SWEEPER.schedule(this::closeOld, IDLE_MS + 1, TimeUnit.MILLISECONDS);
        }
    }

    private synchronized void closeOld() {
        for (Deque<Kept<T>> idle : kept.values()) {
            while (!idle.isEmpty() && Deadline.passed(idle.peekFirst().until)) {
                idle.pollFirst().connection.close();
            }
        }
        kept.values().removeIf(Deque::isEmpty);
    }
}
