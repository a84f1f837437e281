package kera.spark;

import java.math.BigDecimal;
import java.math.BigInteger;

import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.DecimalType;

/** Decimals of 256 bits, and unsigned numbers of 64 bits. */
final class WideColumn extends FixedWidthColumn {
    private final boolean signed;

    /** A column of numbers of `width` bytes. */
    WideColumn(DecimalType type, int width, boolean signed) {
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
