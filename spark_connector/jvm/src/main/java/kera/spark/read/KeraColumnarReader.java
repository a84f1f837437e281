package kera.spark.read;

import java.io.IOException;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Supplier;
import java.util.function.UnaryOperator;

import kera.columns.Columns;
import kera.spark.service.Environment;
import kera.wire.Chunk;
import kera.wire.KeraException;
import kera.wire.Piece;
import kera.wire.PieceReader;
import kera.wire.Planner;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * One task's read: a batch per chunk, made in place; small chunks that are already available are joined into one batch.
 *
 * <p>Promises: the reader returns exactly the records that the piece was planned with, or fails; with
 * {@code failOnDataLoss=false} it returns the records that are left, and logs a warning. If a broker reuses the memory
 * of a chunk before Spark gets the batch, the reader reads the chunk again, as a copy. If the broker reuses it before
 * Spark is done with the batch, the reader fails with {@code MemoryReused}, and Spark runs the task again.
 */
final class KeraColumnarReader implements PartitionReader<ColumnarBatch> {
    private static final Logger LOG = LoggerFactory.getLogger(KeraColumnarReader.class);
    private static final String WAY_OUT =
            "; a query can end before it (endingOffsets) or begin after it (startingOffsets)";

    private final Piece piece;
    private final PieceReader reader;
    private final StructType wanted;
    /** The columns by schema version, for the versions read so far; empty if no column is wanted. */
    private final Map<Integer, Columns> columns = new HashMap<>();
    /** The columns that {@link #batch} is made of. */
    private Columns loaded;
    /** The chunk whose batch Spark is using; null before the first and after the last. */
    private Chunk taken;
    private ColumnarBatch batch;
    /** The last chunk that the batch was made of. */
    private Chunk last;
    private long records;
    private boolean closed;

    KeraColumnarReader(Piece piece, StructType wanted, Supplier<? extends Planner> service) {
        Environment.missingForReading().ifPresent(missing -> {
            throw new KeraException("EngineUnavailable", missing, false);
        });
        this.piece = piece;
        this.wanted = wanted;
        this.reader = new PieceReader(piece, service, !wanted.isEmpty());
        if (!wanted.isEmpty()) {
            columnsOf(piece.schemaId); // an unreadable schema is an error even if the piece has no chunk
        }
    }

    private Columns columnsOf(int schemaId) {
        return columns.computeIfAbsent(piece.schemaIdFor(schemaId), this::newColumns);
    }

    private Columns newColumns(int schemaId) {
        try {
            return new Columns(piece.schemaOf(schemaId), piece.typed, wanted, piece.stream, piece.streamlet,
                    piece.entry, piece.epoch);
        } catch (UnsupportedOperationException error) {
            String way = "; with engine=python it can be read";
            throw new KeraException("EngineUnavailable", error.getMessage() + way, false);
        }
    }

    @Override
    public boolean next() throws IOException {
        requireTakenIntact();
        Chunk chunk = reader.next();
        while (chunk != null && !take(chunk, this::following)) {
            chunk = reader.next();
        }
        if (chunk == null) {
            requireAll();
            return false;
        }
        taken = chunk;
        return true;
    }

    /**
     * The next chunk of a piece without an end, or null if none comes in time; {@link #get} has its records. After
     * using the records, the caller checks that the chunk is intact, and calls {@link #again} if it is not.
     */
    Chunk nextWithin(long timeoutMs) throws IOException {
        Chunk chunk = reader.nextWithin(timeoutMs);
        return chunk == null || take(chunk, alone -> null) ? chunk : nextWithin(0);
    }

    /** Continue with `chunk`, the last one returned, once more. */
    void again(Chunk chunk) {
        records -= batch.numRows();
        reader.again(chunk);
    }

    private Chunk following(Chunk before) {
        Chunk found = reader.following(before);
        last = found == null ? before : found;
        return found;
    }

    /** Make a batch of `chunk` and of those that `more` returns; false: `chunk` was overwritten and will come again. */
    private boolean take(Chunk chunk, UnaryOperator<Chunk> more) {
        last = chunk;
        boolean first = chunk.start.equals(piece.start); // this chunk may begin with records outside of the piece
        long before = first ? piece.firstRecord - chunk.firstRecord : 0;
        int skip = (int) Math.max(0, Math.min(before, chunk.recordCount));
        try {
            batch = load(chunk, skip, more);
        } catch (RuntimeException error) {
            if (chunk.intact()) { // otherwise the bytes that failed to load were not the chunk's
                throw atItsPlace(error, chunk);
            }
        }
        if (!chunk.intact()) {
            reader.again(chunk);
            return false;
        }
        if (last.start.equals(piece.stop)) { // the rest of this chunk belongs to the next micro-batch
            long wantedRecords = piece.stopRecord - chunk.firstRecord - skip;
            batch.setNumRows((int) Math.max(0, Math.min(wantedRecords, batch.numRows())));
        }
        records += batch.numRows();
        return true;
    }

    /** `error`; if a chunk is corrupt, with its place, or that of the joined chunks, and the way out in the message. */
    private RuntimeException atItsPlace(RuntimeException error, Chunk chunk) {
        String type = "CorruptChunk";
        if (!(error instanceof KeraException) || !error.getMessage().startsWith(type + ": ")) {
            return error;
        }
        String where = last == chunk ? chunk.start.toString() : chunk.start + " to " + last.start;
        KeraException told = new KeraException(type, "chunk at " + where + " of " + named()
                + error.getMessage().substring(type.length()) + WAY_OUT, false);
        told.initCause(error);
        return told;
    }

    private ColumnarBatch load(Chunk chunk, int skip, UnaryOperator<Chunk> more) {
        if (wanted.isEmpty()) {
            return new ColumnarBatch(new ColumnVector[0], chunk.recordCount - skip);
        }
        if (loaded != null) {
            loaded.release();
        }
        loaded = columnsOf(chunk.schemaId);
        return loaded.load(chunk, skip, more);
    }

    @Override
    public ColumnarBatch get() {
        return batch;
    }

    @Override
    public CustomTaskMetric[] currentMetricsValues() {
        return KeraMetrics.of(reader.counters());
    }

    /** Release everything, and fail if the memory of the last batch was reused while Spark read it. */
    @Override
    public void close() throws IOException {
        if (closed) {
            return;
        }
        closed = true;
        try (reader) {
            if (piece.end == null && !reader.losses().isEmpty()) {
                LOG.warn("failOnDataLoss=false: {}: {}", named(), String.join("; ", reader.losses()));
            }
            requireTakenIntact();
        } finally {
            columns.values().forEach(Columns::close);
        }
    }

    private void requireTakenIntact() {
        Chunk done = taken;
        taken = null;
        if (done != null) {
            requireIntact(done);
        }
    }

    /** Fail if the records may not be those of the chunk; to be called after they were read. */
    private void requireIntact(Chunk chunk) {
        if (!chunk.intact()) {
            throw new KeraException(
                    "MemoryReused",
                    named() + ": its broker is gone, and its memory was used again while Spark took records from it;"
                            + " the task has to be run again",
                    true);
        }
    }

    private void requireAll() {
        if (piece.end == null || records == piece.records) {
            return;
        }
        String what = named() + " gave " + records + " of the " + piece.records + " records between "
                + piece.start + " and " + piece.end;
        List<String> losses = reader.losses();
        if (losses.isEmpty() || records > piece.records) {
            throw new KeraException("DataLost", what, false);
        }
        LOG.warn("failOnDataLoss=false: {}; {}", what, String.join("; ", losses));
    }

    private String named() {
        return "stream '" + piece.stream + "', streamlet " + piece.streamlet + ", entry " + piece.entry;
    }
}
