package kera.columns;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.unsafe.types.UTF8String;

/** The same string, number or null in each row. (Spark's own class loses its value when a batch is closed.) */
final class ConstantColumn extends OwnColumn {
    private final Object value;
    private int rows;

    ConstantColumn(DataType type, Object value) {
        super(type);
        this.value = value;
    }

    /** Begin a batch of `rows` rows. */
    void begin(int rows) {
        this.rows = rows;
    }

    @Override
    public boolean isNullAt(int row) {
        return value == null;
    }

    @Override
    public int numNulls() {
        return value == null ? rows : 0;
    }

    @Override
    public int getInt(int row) {
        return value == null ? 0 : (Integer) value;
    }

    @Override
    public long getLong(int row) {
        return value == null ? 0 : (Long) value;
    }

    @Override
    public UTF8String getUTF8String(int row) {
        return (UTF8String) value;
    }
}
