package kera.spark.write;

import java.io.IOException;

/**
 * Sends what is due while a task waits for rows: a thread, which has the task's writer while that waits for nothing
 * else. What goes wrong is told when the task goes on.
 */
final class DueChunks {

    /** So often it is looked at what is due: this part of the time that a chunk may fill. */
    private static final int LOOKS = 8;
    private static final long LOOK_MS_MAX = 100;

    private final Work work;
    private final Filling filling;
    private final Thread thread = new Thread(this::run, "kera-due-chunks");
    private Throwable failed;
    private boolean ended;

    /** What sends the chunks that are due. */
    interface Work {
        void sendDue(long dueNanos) throws IOException;
    }

    /** Who calls this has {@code this} as a lock, and holds it whenever the task's writer is used. */
    DueChunks(Filling filling, Work work) {
        this.filling = filling;
        this.work = work;
        thread.setDaemon(true);
        thread.start();
    }

    private synchronized void run() {
        try {
            while (!ended) {
                wait(Math.max(1, Math.min(LOOK_MS_MAX, filling.fillsNanos() / LOOKS / 1_000_000)));
                if (!ended) {
                    work.sendDue(filling.dueNanos());
                }
            }
        } catch (Throwable error) { // whatever it is, the task is to end with it
            failed = error;
        }
    }

    /** Raises what has gone wrong meanwhile. */
    synchronized void check() throws IOException {
        if (failed instanceof IOException error) {
            throw error;
        }
        if (failed instanceof RuntimeException error) {
            throw error;
        }
        if (failed instanceof Error error) {
            throw error;
        }
    }

    /** Nothing more is sent; what is being sent is given up. */
    void end() {
        thread.interrupt();
        synchronized (this) {
            ended = true;
            notifyAll();
        }
    }
}
