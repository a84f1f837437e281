package kera.spark;

import org.apache.arrow.memory.ArrowBuf;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.vectorized.ColumnVector;

/** Values that all have the same number of bytes, one behind the other. */
abstract class FixedWidthColumn extends OwnColumn implements LoadedColumn {
    final int width;
    /** Of the chunk that is loaded. */
    ArrowBuf data;

    FixedWidthColumn(DataType type, int width) {
        super(type);
        this.width = width;
    }

    @Override
    public int load(Body body) {
        int count = begin(body);
        data = body.data((long) count * width);
        return count;
    }

    @Override
    public void release() {
        end();
        data = null;
    }

    @Override
    public ColumnVector column() {
        return this;
    }
}
