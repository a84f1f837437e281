package kera.spark;

import org.apache.spark.sql.types.DataTypes;

/** Values that all have the same number of bytes. */
final class FixedBytesColumn extends FixedWidthColumn {
    FixedBytesColumn(int width) {
        super(DataTypes.BinaryType, width);
    }

    @Override
    public byte[] getBinary(int row) {
        if (isNullAt(row)) {
            return null;
        }
        byte[] value = new byte[width];
        data.getBytes((long) row * width, value);
        return value;
    }
}
