package kera.columns;

import org.apache.arrow.memory.ArrowBuf;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.types.UTF8String;

/** The base of this package's columns: it knows which values are null, and refuses getters that are not overridden. */
abstract class OwnColumn extends ColumnVector {
    private ArrowBuf validity;
    private int nulls;

    OwnColumn(DataType type) {
        super(type);
    }

    /** Take the next field's node and first buffer, and return its number of values. */
    final int begin(Body body) {
        int count = body.node();
        validity = body.validity(count);
        nulls = body.nulls();
        return count;
    }

    /** Drop the buffer of {@link #begin}. */
    final void end() {
        validity = null;
        nulls = 0;
    }

    @Override
    public void close() {
        // The buffers belong to the loaded chunk.
    }

    @Override
    public boolean hasNull() {
        return numNulls() > 0;
    }

    @Override
    public int numNulls() {
        return nulls;
    }

    @Override
    public boolean isNullAt(int row) {
        return nulls > 0 && (validity.getByte(row >> 3) >> (row & 7) & 1) == 0;
    }

    private UnsupportedOperationException notOfType(String type) {
        return new UnsupportedOperationException("no " + type + " in a column of " + dataType().simpleString());
    }

    @Override
    public boolean getBoolean(int row) {
        throw notOfType("boolean");
    }

    @Override
    public byte getByte(int row) {
        throw notOfType("tinyint");
    }

    @Override
    public short getShort(int row) {
        throw notOfType("smallint");
    }

    @Override
    public int getInt(int row) {
        throw notOfType("int");
    }

    @Override
    public long getLong(int row) {
        throw notOfType("bigint");
    }

    @Override
    public float getFloat(int row) {
        throw notOfType("float");
    }

    @Override
    public double getDouble(int row) {
        throw notOfType("double");
    }

    @Override
    public ColumnarArray getArray(int row) {
        throw notOfType("array");
    }

    @Override
    public ColumnarMap getMap(int row) {
        throw notOfType("map");
    }

    @Override
    public Decimal getDecimal(int row, int precision, int scale) {
        throw notOfType("decimal");
    }

    @Override
    public UTF8String getUTF8String(int row) {
        throw notOfType("string");
    }

    @Override
    public byte[] getBinary(int row) {
        throw notOfType("binary");
    }

    @Override
    public ColumnVector getChild(int ordinal) {
        throw notOfType("column");
    }
}
