package kera.columns;

import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.types.UTF8String;

/** Another column without its first rows. */
final class ShiftedColumn extends OwnColumn {
    private final ColumnVector all;
    private final int skip;
    private final int rows;

    /** The `rows` rows of `all` after the first `skip`. */
    ShiftedColumn(ColumnVector all, int skip, int rows) {
        super(all.dataType());
        this.all = all;
        this.skip = skip;
        this.rows = rows;
    }

    @Override
    public boolean isNullAt(int row) {
        return all.isNullAt(skip + row);
    }

    @Override
    public int numNulls() {
        int nulls = 0;
        for (int row = 0; row < rows; row++) {
            nulls += isNullAt(row) ? 1 : 0;
        }
        return nulls;
    }

    @Override
    public boolean getBoolean(int row) {
        return all.getBoolean(skip + row);
    }

    @Override
    public byte getByte(int row) {
        return all.getByte(skip + row);
    }

    @Override
    public short getShort(int row) {
        return all.getShort(skip + row);
    }

    @Override
    public int getInt(int row) {
        return all.getInt(skip + row);
    }

    @Override
    public long getLong(int row) {
        return all.getLong(skip + row);
    }

    @Override
    public float getFloat(int row) {
        return all.getFloat(skip + row);
    }

    @Override
    public double getDouble(int row) {
        return all.getDouble(skip + row);
    }

    @Override
    public ColumnarArray getArray(int row) {
        return all.getArray(skip + row);
    }

    @Override
    public ColumnarMap getMap(int row) {
        return all.getMap(skip + row);
    }

    @Override
    public Decimal getDecimal(int row, int precision, int scale) {
        return all.getDecimal(skip + row, precision, scale);
    }

    @Override
    public UTF8String getUTF8String(int row) {
        return all.getUTF8String(skip + row);
    }

    @Override
    public byte[] getBinary(int row) {
        return all.getBinary(skip + row);
    }

    /** The child of a struct, shifted too, because its fields have a value for each row. */
    @Override
    public ColumnVector getChild(int ordinal) {
        return new ShiftedColumn(all.getChild(ordinal), skip, rows);
    }
}
