package kera.columns;

import java.math.BigDecimal;
import java.math.BigInteger;

import org.apache.arrow.memory.ArrowBuf;
import org.apache.arrow.memory.util.Float16;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.vectorized.ColumnVector;

/** Values of the same number of bytes, stored one after the other. */
abstract class FixedWidthColumn extends OwnColumn implements LoadedColumn {
    final int width;
    /** The values of the loaded chunk. */
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

    /** Byte strings of a fixed length. */
    static final class Bytes extends FixedWidthColumn {
        Bytes(int width) {
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

    /** Floating-point numbers of 16 bits, as floats. */
    static final class Halves extends FixedWidthColumn {
        Halves() {
            super(DataTypes.FloatType, Short.BYTES);
        }

        @Override
        public float getFloat(int row) {
            return Float16.toFloat(data.getShort((long) row * Short.BYTES));
        }
    }

    /** Decimals of 256 bits, and unsigned numbers of 64 bits. */
    static final class Wide extends FixedWidthColumn {
        private final boolean signed;

        /** A column of numbers of `width` bytes. */
        Wide(DecimalType type, int width, boolean signed) {
            super(type, width);
            this.signed = signed;
        }

        @Override
        public Decimal getDecimal(int row, int precision, int scale) {
            return isNullAt(row) ? null : Decimal.apply(new BigDecimal(unscaled(row), scale), precision, scale);
        }

        private BigInteger unscaled(int row) {
            byte[] number = new byte[width];
            data.getBytes((long) row * width, number);
            for (int low = 0, high = width - 1; low < high; low++, high--) { // BigInteger is big-endian
                byte swapped = number[low];
                number[low] = number[high];
                number[high] = swapped;
            }
            return signed ? new BigInteger(number) : new BigInteger(1, number);
        }
    }
}
