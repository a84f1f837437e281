package kera.spark.write;

import java.io.IOException;

/**
 * A thread that sends due chunks while a task waits for rows. It uses the task's writer whenever the task does not.
 * {@link #check} raises its errors in the task.
 */
final class DueChunks {

    /** The thread looks for due chunks this often within the time that a chunk may fill. */
    private static final int LOOKS = 8;
    private static final long LOOK_MS_MAX = 100;

    private final Work work;
    private final Filling filling;
    private final Thread thread = new Thread(this::run, "kera-due-chunks");
    private Throwable failed;
    private boolean ended;

    /** Sends the chunks that are due. */
    interface Work {
        void sendDue(long dueNanos) throws IOException;
    }

    /** The caller must hold the lock of {@code this} whenever it uses the task's writer. */
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
        } catch (Throwable error) { // any error must end the task
            failed = error;
        }
    }

    /** Raise the error of the thread, if it had one. */
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

    /** Send nothing more, and abandon what is being sent. */
    void end() {
        thread.interrupt();
        synchronized (this) {
            ended = true;
            notifyAll();
        }
    }
}
