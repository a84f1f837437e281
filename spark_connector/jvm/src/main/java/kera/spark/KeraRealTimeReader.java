package kera.spark;

import java.io.IOException;

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
 * only then its chunk is asked whether it is still there.
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
        if (left == 0 && !load(timeoutMs)) {
            return NOTHING;
        }
        row = copy.apply(batch.getRow(batch.numRows() - left));
        batches.requireIntact(chunk);
        left--;
        nextRecord++;
        return ROW;
    }

    private boolean load(long timeoutMs) throws IOException {
        long deadline = Deadline.afterMs(timeoutMs);
        do {
            Chunk came = batches.nextWithin(Math.max(0, Deadline.leftNanos(deadline) / 1_000_000));
            if (came == null) {
                return false;
            }
            chunk = came;
            batch = batches.get();
            left = batch.numRows();
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
            place = left == 0 ? chunk.next : chunk.start;
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
