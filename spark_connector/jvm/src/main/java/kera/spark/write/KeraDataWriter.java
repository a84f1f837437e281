package kera.spark.write;

import java.io.IOException;
import java.util.ArrayList;
import java.util.List;

import kera.wire.ChunkSender;
import kera.wire.Outlet;
import kera.wire.WriteTarget;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.connector.write.DataWriter;

/**
 * Writes the rows of one task: splits them by streamlet, gathers them into chunks, and has these appended.
 *
 * <p>When a chunk is full depends only on the rows before. So an attempt that gets the same rows in the same order
 * makes the same chunks, and finds them stored without comparing single rows. Chunks of different streamlets are in
 * flight concurrently, one per streamlet. At most {@link #GATHERED_BYTES_MAX} and one row are gathered; while more than
 * {@link #WAITING_BYTES_MAX} wait to be stored, nothing is gathered.
 *
 * <p>With a latency target, chunks are also sent when they are due, even while the task waits for rows. Then a repeat
 * of the task has to compare rows.
 */
final class KeraDataWriter implements DataWriter<InternalRow> {

    private static final long GATHERED_BYTES_MAX = 32 << 20;
    private static final long WAITING_BYTES_MAX = 16 << 20;
    /** The writer looks for answers each time it has gathered this many bytes. */
    private static final long LOOK_BYTES = 64 << 10;
    /** The number of streamlets whose row memory is reused; for more streamlets that would take too much memory. */
    private static final int REUSING_MAX = 16;

    private final WriteTarget target;
    private final RowGatherer gatherer;
    private final ChunkSender sender;
    /** The sender of due chunks, and the lock of this writer; null without a latency target. */
    private final DueChunks due;
    private final Outlet[] byStreamlet;
    private final List<Outlet> outlets = new ArrayList<>();
    private long gatheredBytes;
    private long waitingBytes;
    private long unlookedBytes;

    /** {@code filling} says how long chunks may fill; null without a latency target. */
    KeraDataWriter(WriteTarget target, RowGatherer gatherer, ChunkSender sender, Filling filling) {
        this.target = target;
        this.gatherer = gatherer;
        this.sender = sender;
        byStreamlet = new Outlet[target.streamlets()];
        due = filling == null ? null : new DueChunks(filling, this::sendDue);
    }

    @Override
    public void write(InternalRow given) throws IOException {
        if (due == null) {
            gather(given);
            return;
        }
        synchronized (due) {
            due.check();
            gather(given);
        }
    }

    private void sendDue(long dueNanos) throws IOException {
        long now = System.nanoTime();
        for (Outlet outlet : outlets) {
            if (outlet.open().count() > 0 && now - outlet.fillingSince() >= dueNanos) {
                send(outlet);
            }
        }
        sender.look();
    }

    private void gather(InternalRow given) throws IOException {
        UnsafeRow row = gatherer.unsafe(given);
        Outlet outlet = outlet(gatherer.streamlet(row));
        long bytes = gatherer.bytes(row);
        if (outlet.open().count() > 0 && (outlet.open().bytes() + bytes > 2L * target.chunkBytes()
                || gatherer.beginsEpoch(row, outlet.open()))) {
            send(outlet);
        }
        if (due != null && outlet.open().count() == 0) {
            outlet.startFilling();
        }
        gatherer.add(row, bytes, outlet.open());
        gatheredBytes += bytes;
        if (outlet.open().bytes() >= target.chunkBytes()) {
            send(outlet);
        }
        if (gatheredBytes > GATHERED_BYTES_MAX) {
            sendAll();
        }
        unlookedBytes += bytes;
        if (unlookedBytes >= LOOK_BYTES) {
            unlookedBytes = 0;
            sender.look();
            while (waiting() > WAITING_BYTES_MAX) {
                await();
            }
        }
    }

    /** Wait for an answer, unless Spark has cancelled the task. */
    private void await() throws IOException {
        TaskContext task = TaskContext.get();
        if (task != null) {
            task.killTaskIfInterrupted();
        }
        sender.await();
    }

    private Outlet outlet(int streamlet) {
        Outlet outlet = byStreamlet[streamlet];
        if (outlet == null) {
            outlet = new Outlet(streamlet, gatherer.timed(), outlets.size() < REUSING_MAX);
            byStreamlet[streamlet] = outlet;
            outlets.add(outlet);
        }
        return outlet;
    }

    private void send(Outlet outlet) throws IOException {
        gatheredBytes -= outlet.open().bytes();
        outlet.close();
        sender.start(outlet);
    }

    private void sendAll() throws IOException {
        for (Outlet outlet : outlets) {
            if (outlet.open().count() > 0) {
                send(outlet);
            }
        }
    }

    private long waiting() {
        long bytes = 0;
        for (Outlet outlet : outlets) {
            bytes += outlet.waitingBytes();
        }
        return bytes;
    }

    /** Store all rows that are left; return when all are stored. */
    @Override
    public KeraWritten commit() throws IOException {
        if (due == null) {
            return finish();
        }
        synchronized (due) {
            due.check();
            return finish();
        }
    }

    private KeraWritten finish() throws IOException {
        sendAll();
        long appended = 0;
        long found = 0;
        long surplus = 0;
        for (Outlet outlet : outlets) {
            while (outlet.first() != null) {
                await();
            }
        }
        for (Outlet outlet : outlets) {
            appended += outlet.rowsAppended();
            found += outlet.rowsFound();
            surplus += outlet.rowsSurplus();
        }
        return new KeraWritten(appended, found, surplus);
    }

    /** Close the writer. Stored rows stay: a repeat of the task finds them. */
    @Override
    public void abort() {
        close();
    }

    @Override
    public void close() {
        if (due == null) {
            sender.close();
            return;
        }
        due.end();
        synchronized (due) {
            sender.close();
        }
    }
}
