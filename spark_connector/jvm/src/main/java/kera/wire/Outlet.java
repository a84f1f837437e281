package kera.wire;

import java.nio.ByteBuffer;
import java.util.ArrayDeque;
import java.util.Deque;

/**
 * The rows of one attempt for one streamlet, stored once however often the task is run: the same protocol as
 * {@code StreamletWriter} of {@code writing/streamlet_writer.py}, where it is proven.
 */
public final class Outlet {

    final int streamlet;
    /** Whether rows that wait are about to be sent, or under way. */
    boolean begun;
    /** The chunk that was made of the first rows that wait, in its frame, while it is under way; null: none is. */
    ByteBuffer frame;
    /** When it was sent. */
    long sent;
    /** Whether something was acknowledged since a chunk failed. */
    boolean progressed = true;
    /** Where the chunk ended that was read back last; null: none was. */
    Position found;

    private final boolean timed;
    private final boolean reusing;
    private final Deque<Rows> waiting = new ArrayDeque<>();
    private final RowCounts surplus = new RowCounts();
    /** Rows that are being gathered. */
    private Rows open;
    /** When the first of them came; only with a latency target. */
    private long fillingSince;
    private Rows spare;
    private long waitingBytes;
    private long sequence;
    private long rowsAppended;
    private long rowsFound;

    /** {@code timed}: rows have times; {@code reusing}: the memory of rows that are stored is used again. */
    public Outlet(int streamlet, boolean timed, boolean reusing) {
        this.streamlet = streamlet;
        this.timed = timed;
        this.reusing = reusing;
        open = new Rows(timed);
    }

    /** The rows that are being gathered. */
    public Rows open() {
        return open;
    }

    /** The first of them comes now. */
    public void startFilling() {
        fillingSince = System.nanoTime();
    }

    /** When the first of them came, if {@link #startFilling} was called; by {@link System#nanoTime}. */
    public long fillingSince() {
        return fillingSince;
    }

    /** The rows that were gathered are to be stored. */
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

    /** The rows that the next chunk is made of; null: none wait. */
    public Rows first() {
        return waiting.peekFirst();
    }

    /** Whether rows wait that nobody sends. */
    boolean idle() {
        return !begun && !waiting.isEmpty();
    }

    /** Of the rows that wait. */
    public long waitingBytes() {
        return waitingBytes;
    }

    /** Of the next chunk. */
    long sequence() {
        return sequence;
    }

    /** The first rows are stored. {@code duplicate}: somebody else had stored the chunk, nobody knows what it was. */
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

    /** These rows were stored already as the next chunk. */
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

    /** Rows that were found, and that this attempt has not had (yet). */
    public long rowsSurplus() {
        return surplus.total();
    }
}
