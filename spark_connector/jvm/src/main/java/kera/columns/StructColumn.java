package kera.columns;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.vectorized.ColumnVector;

/** Structs with their wanted fields. */
final class StructColumn extends OwnColumn implements LoadedColumn {
    private final FieldLoader[] fields;
    private final ColumnVector[] children;

    /**
     * A column of structs.
     *
     * @param fields all fields in Arrow, in Arrow's order
     * @param children the fields in Spark, in Spark's order
     */
    StructColumn(DataType type, FieldLoader[] fields, ColumnVector[] children) {
        super(type);
        this.fields = fields;
        this.children = children;
    }

    @Override
    public int load(Body body) {
        int count = begin(body);
        for (FieldLoader field : fields) {
            int there = field.load(body);
            if (there < count) {
                throw body.corrupt(count + " structs with a field of " + there + " values");
            }
        }
        return count;
    }

    @Override
    public void release() {
        end();
        for (FieldLoader field : fields) {
            field.release();
        }
    }

    @Override
    public ColumnVector column() {
        return this;
    }

    @Override
    public ColumnVector getChild(int ordinal) {
        return children[ordinal];
    }
}
