package kera.columns;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.function.UnaryOperator;
import kera.wire.Chunk;
import kera.wire.KeraException;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.memory.OutOfMemoryException;
import org.apache.arrow.vector.types.pojo.Field;
import org.apache.arrow.vector.types.pojo.Schema;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.ArrowUtils;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Chunks of one entry as Spark batches, without copying their values.
 *
 * <p>Only the wanted columns of each chunk are read. If its bytes are not a batch of the schema, loading it raises a
 * {@link KeraException} CorruptChunk. Reads of a loaded batch stay within the chunk's memory, whatever happens to its
 * bytes. A batch is valid until the next one is loaded, or until this object is closed. Not thread-safe.
 */
public final class Columns implements AutoCloseable {
    private static final String KEYS = "keys";
    private static final ArrayType KEYS_TYPE = DataTypes.createArrayType(DataTypes.BinaryType);

    private final BufferAllocator allocator;
    private final Body arrow;
    private final Body lean;
    private final JoinedBody joined;
    private final List<FieldLoader> loaders = new ArrayList<>();
    private final List<ConstantColumn> constants = new ArrayList<>();
    private final OrdinalColumn ordinals = new OrdinalColumn();
    private final ColumnVector[] columns;
    private final ColumnarBatch batch;
    private FirstKeyColumn firstKeys;

    /**
     * The columns `wanted`, in that order. Throws UnsupportedOperationException if there cannot be such columns.
     *
     * @param arrowSchema the stream's schema, as an Arrow IPC message
     * @param typed whether the columns are those of the stream's own schema, or those of a record
     * @param epoch the epoch of all records, if an epoch column is to show it; or null
     */
    public Columns(byte[] arrowSchema, boolean typed, StructType wanted, String stream, int streamlet, int entry,
            Long epoch) {
        allocator = ArrowUtils.rootAllocator().newChildAllocator("kera " + stream, 0, Long.MAX_VALUE);
        try {
            Schema schema = schemaOf(arrowSchema);
            Map<String, LoadedColumn> loaded = loaded(schema, typed, wanted);
            arrow = new ArrowBody(allocator);
            lean = new LeanBody(allocator, schema);
            joined = new JoinedBody(allocator, schema);
            columns = new ColumnVector[wanted.size()];
            for (int index = 0; index < columns.length; index++) {
                StructField field = wanted.fields()[index];
                LoadedColumn own = loaded.get(field.name());
                if (own != null) {
                    columns[index] = own.column();
                } else if (epoch != null && field.name().equals("epoch")) {
                    columns[index] = constant(field.dataType(), epoch);
                } else if (typed) {
                    columns[index] = missing(field, stream);
                } else {
                    columns[index] = switch (field.name()) {
                        case "key" -> firstKeys = new FirstKeyColumn((ListColumn) loaded.get(KEYS));
                        case "stream" -> constant(field.dataType(), UTF8String.fromString(stream));
                        case "streamlet" -> constant(field.dataType(), streamlet);
                        case "entry" -> constant(field.dataType(), entry);
                        case "offset" -> ordinals;
                        default -> throw new UnsupportedOperationException("records have no " + field.name());
                    };
                }
            }
            batch = new ColumnarBatch(columns);
        } catch (RuntimeException error) {
            allocator.close();
            throw error;
        }
    }

    private static Schema schemaOf(byte[] message) {
        try {
            return Schema.deserializeMessage(ByteBuffer.wrap(message));
        } catch (IllegalArgumentException error) { // Arrow has this type, but its Java library does not
            throw new UnsupportedOperationException("the stream's schema cannot be read: " + error.getMessage(), error);
        }
    }

    /** Make the columns that are read from chunks, and fill {@link #loaders} in the order of `schema`. */
    private Map<String, LoadedColumn> loaded(Schema schema, boolean typed, StructType wanted) {
        Map<String, DataType> types = new HashMap<>();
        for (StructField field : wanted.fields()) {
            types.put(field.name(), field.dataType());
        }
        if (!typed && types.remove("key") != null) {
            types.putIfAbsent(KEYS, KEYS_TYPE);
        }
        ColumnFactory factory = new ColumnFactory(allocator);
        Map<String, LoadedColumn> loaded = new HashMap<>();
        int last = 0;
        for (Field field : schema.getFields()) {
            DataType type = types.remove(field.getName());
            if (type == null) {
                loaders.add(ColumnFactory.skipped(field));
            } else {
                LoadedColumn column = factory.column(field, type);
                loaders.add(NeverNull.unlessNullable(field, column));
                loaded.put(field.getName(), column);
                last = loaders.size();
            }
        }
        loaders.subList(last, loaders.size()).clear(); // fields after the last wanted one need not be skipped
        return loaded;
    }

    private ColumnVector missing(StructField field, String stream) {
        if (!field.nullable()) {
            throw new KeraException("SchemaMismatch", "a chunk of stream '" + stream + "' has no column '"
                    + field.name() + "', which is not nullable", false);
        }
        return constant(field.dataType(), null);
    }

    private ConstantColumn constant(DataType type, Object value) {
        ConstantColumn column = new ConstantColumn(type, value);
        constants.add(column);
        return column;
    }

    /**
     * The columns of `chunk`, in place; the payload is not read if no wanted column is in it. If the chunk is small,
     * the small chunks after it are joined with it, as a copy.
     *
     * @param skip number of records to leave out at the beginning
     * @param more returns the small chunk after the given one, or null if there is none
     */
    public ColumnarBatch load(Chunk chunk, int skip, UnaryOperator<Chunk> more) {
        release();
        int rows = loaders.isEmpty() ? chunk.recordCount : loadPayload(chunk, more);
        ordinals.begin(chunk.firstRecord);
        constants.forEach(constant -> constant.begin(rows));
        if (firstKeys != null) {
            firstKeys.begin(rows);
        }
        if (skip == 0) {
            batch.setNumRows(rows);
            return batch;
        }
        int left = Math.max(rows - skip, 0);
        ColumnVector[] shifted = new ColumnVector[columns.length];
        for (int index = 0; index < columns.length; index++) {
            shifted[index] = new ShiftedColumn(columns[index], skip, left);
        }
        return new ColumnarBatch(shifted, left);
    }

    /** Load `chunk` and the chunks joined with it; return the number of records. */
    private int loadPayload(Chunk chunk, UnaryOperator<Chunk> more) {
        int rows = chunk.recordCount;
        Chunk behind = chunk.isSmall() ? more.apply(chunk) : null;
        Body body = behind != null ? joined : chunk.lean ? lean : arrow;
        boolean whole = false;
        try {
            body.open(chunk);
            for (; behind != null; behind = joined.isFull() ? null : more.apply(behind)) {
                joined.add(behind);
                rows += behind.recordCount;
            }
            for (FieldLoader loader : loaders) {
                int count = loader.load(body);
                if (count != rows) {
                    throw body.corrupt(count + " values for " + rows + " records");
                }
            }
            whole = true;
            return rows;
        } catch (KeraException | OutOfMemoryException error) {
            throw error;
        } catch (RuntimeException error) { // see Body
            KeraException corrupt = body.corrupt(error.toString());
            corrupt.initCause(error);
            throw corrupt;
        } finally {
            if (!whole) {
                release();
            }
        }
    }

    /** Release what was loaded; it must not be used any more. */
    public void release() {
        loaders.forEach(FieldLoader::release);
        arrow.release();
        lean.release();
        joined.release();
    }

    /** Free all memory; fail if any of it is still in use. */
    @Override
    public void close() {
        release();
        allocator.close();
    }
}
