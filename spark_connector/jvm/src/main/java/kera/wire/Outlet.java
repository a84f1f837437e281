package kera.wire;

import java.nio.ByteBuffer;
import java.util.ArrayDeque;
import java.util.Deque;

/**
 * The rows of one attempt for one streamlet, stored exactly once however often the task runs. The protocol is that of
 * {@code StreamletWriter} in {@code writing/streamlet_writer.py}, which proves it.
 */
public final class Outlet {

    final int streamlet;
    /** Whether waiting rows are queued to be sent, or in flight. */
    boolean begun;
    /** The frame with the chunk in flight, made of the first waiting rows; null if no chunk is in flight. */
    ByteBuffer frame;
    /** The time when that chunk was last sent. */
    long sent;
    /** Whether a chunk was acknowledged since the last failure. */
    boolean progressed = true;
    /** End of the chunk that was last read back; null if none was. */
    Position found;

    private final boolean timed;
    private final boolean reusing;
    private final Deque<Rows> waiting = new ArrayDeque<>();
    private final RowCounts surplus = new RowCounts();
    /** The rows being gathered. */
    private Rows open;
    /** The time when the first of them arrived; only with a latency target. */
    private long fillingSince;
    private Rows spare;
    private long waitingBytes;
    private long sequence;
    private long rowsAppended;
    private long rowsFound;

    /** {@code timed}: rows have times; {@code reusing}: the memory of stored rows is reused. */
    public Outlet(int streamlet, boolean timed, boolean reusing) {
        this.streamlet = streamlet;
        this.timed = timed;
        this.reusing = reusing;
        open = new Rows(timed);
    }

    /** The rows being gathered. */
    public Rows open() {
        return open;
    }

    /** Note that the first row of {@link #open} arrives now. */
    public void startFilling() {
        fillingSince = System.nanoTime();
    }

    /** The time of the last call of {@link #startFilling}, by {@link System#nanoTime}. */
    public long fillingSince() {
        return fillingSince;
    }

    /** Queue the gathered rows to be stored. */
    public void close() {
        add(open);
        open = spare != null ? spare : new Rows(timed);
        spare = null;
    }

    private void add(Rows rows) {
        Rows left = surplus.take(rows);
        rowsFound += rows.count() - left.count();
        if (left.count() > 0) {
            waiting.addLast(left);
            waitingBytes += left.bytes();
        }
    }

    /** The rows that the next chunk is made of; null if no rows wait. */
    public Rows first() {
        return waiting.peekFirst();
    }

    /** Whether rows wait, but are neither queued to be sent nor in flight. */
    boolean idle() {
        return !begun && !waiting.isEmpty();
    }

    /** The size of the waiting rows. */
    public long waitingBytes() {
        return waitingBytes;
    }

    /** The sequence number of the next chunk. */
    long sequence() {
        return sequence;
    }

    /** The first rows are stored. {@code duplicate}: the broker already had the chunk, whose rows are not known. */
    void stored(boolean duplicate) {
        Rows rows = removeFirst();
        if (duplicate) {
            rowsFound += rows.count();
        } else {
            rowsAppended += rows.count();
        }
        if (reusing) {
            rows.clear();
            spare = rows;
        }
        sequence++;
    }

    /** The next chunk is stored already, with {@code rows}. */
    void stored(Rows rows) {
        sequence++;
        if (RowWalk.begins(waiting.peekFirst(), rows)) { // the usual case: the same order as the first time
            Rows ours = removeFirst();
            rowsFound += rows.count();
            if (rows.count() < ours.count()) {
                Rows rest = RowWalk.from(ours, rows.count());
                waiting.addFirst(rest);
                waitingBytes += rest.bytes();
            }
            return;
        }
        surplus.add(rows);
        Deque<Rows> before = new ArrayDeque<>(waiting);
        waiting.clear();
        waitingBytes = 0;
        before.forEach(this::add);
        if (surplus.total() > RowCounts.ROWS_MAX) {
            throw new KeraException("TooManyRows", "earlier attempts of this task have stored " + surplus.total()
                    + " rows in another order, more than can be compared (" + RowCounts.ROWS_MAX
                    + "); use more, smaller partitions", false);
        }
    }

    private Rows removeFirst() {
        Rows rows = waiting.removeFirst();
        waitingBytes -= rows.bytes();
        return rows;
    }

    public long rowsAppended() {
        return rowsAppended;
    }

    public long rowsFound() {
        return rowsFound;
    }

    /** The number of stored rows that this attempt does not have (yet). */
    public long rowsSurplus() {
        return surplus.total();
    }
}
