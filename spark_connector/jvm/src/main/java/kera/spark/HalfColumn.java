package kera.spark;

import org.apache.arrow.memory.util.Float16;
import org.apache.spark.sql.types.DataTypes;

/** Floating-point numbers of 16 bits, as floats. */
final class HalfColumn extends FixedWidthColumn {
    HalfColumn() {
        super(DataTypes.FloatType, Short.BYTES);
    }

    @Override
    public float getFloat(int row) {
        return Float16.toFloat(data.getShort((long) row * Short.BYTES));
    }
}
