package kera.spark.read;

import java.io.IOException;

import kera.wire.Chunk;
import kera.wire.Deadline;
import kera.wire.Piece;
import kera.wire.Position;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.connector.read.streaming.PartitionOffset;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeRead;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * One task's read in real-time mode: the rows of an entry as they come, until Spark's time is up.
 *
 * <p>Promises: the place it gives then is right behind the last row that Spark has taken, be that within a chunk. Rows
 * may leave Spark as soon as it has them, so none is given that memory might have changed under: each is copied, and
 * only then its chunk is asked whether it is still there. If it is not, it is read again from that row on.
 */
final class KeraRealTimeReader implements SupportsRealTimeRead<InternalRow> {
    // Spark makes nothing of when a record has arrived.
    private static final RecordStatus ROW = RecordStatus.newStatusWithoutArrivalTime(true);
    private static final RecordStatus NOTHING = RecordStatus.newStatusWithoutArrivalTime(false);

    private final Piece piece;
    private final KeraColumnarReader batches;
    private final UnsafeProjection copy;
    private Chunk chunk;
    private ColumnarBatch batch;
    /** How many rows of the batch Spark has not taken yet. */
    private int left;
    /** The chunk that was not there any more before all its rows were taken; null: none, or it has come again. */
    private Chunk interrupted;
    private InternalRow row;
    private long nextRecord;

    KeraRealTimeReader(Piece piece, UnsafeProjection copy, KeraColumnarReader batches) {
        this.piece = piece;
        this.copy = copy;
        this.batches = batches;
        nextRecord = piece.firstRecord;
    }

    @Override
    public RecordStatus nextWithTimeout(Long timeoutMs) throws IOException {
        long deadline = Deadline.afterMs(timeoutMs);
        while (left > 0 || load(deadline)) {
            if (copied()) {
                left--;
                nextRecord++;
                return ROW;
            }
            interrupted = chunk;
            left = 0;
            batches.again(chunk);
        }
        return NOTHING;
    }

    /** Whether the next row was copied from what it is. */
    private boolean copied() {
        try {
            row = copy.apply(batch.getRow(batch.numRows() - left));
        } catch (RuntimeException error) {
            if (chunk.intact()) {
                throw error;
            }
        }
        return chunk.intact();
    }

    private boolean load(long deadline) throws IOException {
        do {
            Chunk came = batches.nextWithin(Math.max(0, Deadline.leftNanos(deadline) / 1_000_000));
            if (came == null) {
                return false;
            }
            chunk = came;
            batch = batches.get();
            left = batch.numRows();
            long first = chunk.firstRecord + chunk.recordCount - left;
            if (interrupted != null && chunk.start.equals(interrupted.start)) { // some of its rows were given
                left -= (int) Math.max(0, Math.min(nextRecord - first, left));
            }
            interrupted = null;
            nextRecord = chunk.firstRecord + chunk.recordCount - left;
        } while (left == 0);
        return true;
    }

    @Override
    public InternalRow get() {
        return row;
    }

    /** Asked for when the time is up. */
    @Override
    public PartitionOffset getOffset() {
        Position place = piece.start;
        if (chunk != null) {
            place = left == 0 && interrupted == null ? chunk.next : chunk.start;
        }
        return new KeraPartitionOffset(piece.stream, piece.streamlet, piece.entry, place, nextRecord);
    }

    @Override
    public boolean next() {
        throw new UnsupportedOperationException("an entry has no end to wait for");
    }

    @Override
    public void close() throws IOException {
        batches.close();
    }
}
