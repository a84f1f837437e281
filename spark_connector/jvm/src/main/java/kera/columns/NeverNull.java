package kera.columns;

import org.apache.arrow.vector.types.pojo.ArrowType;
import org.apache.arrow.vector.types.pojo.Field;
import org.apache.spark.sql.vectorized.ColumnVector;

/** Loads a column and refuses nulls: Spark does not check for nulls where its schema excludes them, nor in maps. */
final class NeverNull implements LoadedColumn {
    private final String name;
    private final LoadedColumn column;

    private NeverNull(String name, LoadedColumn column) {
        this.name = name;
        this.column = column;
    }

    /** The loader of `column`, which refuses nulls unless `field` allows them. */
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
