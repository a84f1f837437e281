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
 * One task's read in real-time mode: the rows of an entry as they arrive, until Spark's time is up.
 *
 * <p>Promises: the offset that it reports then is right after the last row that Spark took, even within a chunk. Spark
 * may output rows as soon as it has them, so the reader never returns a row whose memory may have changed: it copies
 * each row, and then checks that the chunk is intact. If it is not, the reader reads the chunk again from that row on.
 */
final class KeraRealTimeReader implements SupportsRealTimeRead<InternalRow> {
    // Spark does not use the arrival time of records.
    private static final RecordStatus ROW = RecordStatus.newStatusWithoutArrivalTime(true);
    private static final RecordStatus NOTHING = RecordStatus.newStatusWithoutArrivalTime(false);

    private final Piece piece;
    private final KeraColumnarReader batches;
    private final UnsafeProjection copy;
    private Chunk chunk;
    private ColumnarBatch batch;
    /** The number of rows of the batch that Spark has not taken yet. */
    private int left;
    /** The chunk that was overwritten before all its rows were taken; null if there is none, or it has come again. */
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

    /** Copy the next row; false if the chunk was overwritten meanwhile. */
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
            if (interrupted != null && chunk.start.equals(interrupted.start)) { // Spark has taken some rows
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

    /** The place after the last row taken; Spark asks for it when the time is up. */
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
