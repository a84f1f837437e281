package kera.columns;

import org.apache.arrow.vector.types.pojo.ArrowType;
import org.apache.arrow.vector.types.pojo.Field;
import org.apache.spark.sql.vectorized.ColumnVector;

/** Loads a column, and refuses nulls in it: Spark does not look for them where its schema has none, nor in maps. */
final class NeverNull implements LoadedColumn {
    private final String name;
    private final LoadedColumn column;

    private NeverNull(String name, LoadedColumn column) {
        this.name = name;
        this.column = column;
    }

    /** What loads `column`, of which `field` says whether it may have nulls. */
    static LoadedColumn unlessNullable(Field field, LoadedColumn column) {
        boolean anyNulls = field.isNullable() || field.getType() instanceof ArrowType.Null;
        return anyNulls ? column : new NeverNull(field.getName(), column);
    }

    @Override
    public int load(Body body) {
        int count = column.load(body);
        int nulls = column.column().numNulls();
        if (nulls > 0) {
            throw body.corrupt(nulls + " nulls in '" + name + "', which is not nullable");
        }
        return count;
    }

    @Override
    public ColumnVector column() {
        return column.column();
    }

    @Override
    public void release() {
        column.release();
    }
}
