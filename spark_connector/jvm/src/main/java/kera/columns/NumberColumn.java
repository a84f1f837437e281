package kera.columns;

import kera.wire.KeraException;
import org.apache.spark.sql.types.DataType;

/** Whole numbers of a type that Spark lacks, as a type that it has; also times, converted to another unit. */
final class NumberColumn extends FixedWidthColumn {
    private final String arrowType;
    private final boolean signed;
    private final long times;
    private final long by;

    /**
     * A column of numbers of `width` bytes, which are multiplied with `times` and then divided by `by`.
     *
     * @param arrowType the name of their Arrow type, for errors
     */
    NumberColumn(DataType type, String arrowType, int width, boolean signed, long times, long by) {
        super(type, width);
        this.arrowType = arrowType;
        this.signed = signed;
        this.times = times;
        this.by = by;
    }

    @Override
    public short getShort(int row) {
        return (short) number(row);
    }

    @Override
    public int getInt(int row) {
        return (int) number(row);
    }

    @Override
    public long getLong(int row) {
        return number(row);
    }

    private long number(int row) {
        long stored = stored(row);
        if (by > 1) {
            return stored % by == 0 ? stored / by : unfit(row, stored, "would lose data");
        }
        long high = Math.multiplyHigh(stored, times);
        long number = stored * times;
        return high == number >> 63 ? number : unfit(row, stored, "would be out of bounds");
    }

    private long stored(int row) {
        return switch (width) {
            case 1 -> data.getByte(row) & 0xFF;
            case 2 -> data.getShort(2L * row) & 0xFFFF;
            case 4 -> signed ? data.getInt(4L * row) : data.getInt(4L * row) & 0xFFFF_FFFFL;
            default -> data.getLong(8L * row);
        };
    }

    /** Throw SchemaMismatch, except for a null: its stored number does not matter, but Spark reads it in bulk reads. */
    private long unfit(int row, long stored, String why) {
        if (isNullAt(row)) {
            return 0;
        }
        throw new KeraException("SchemaMismatch", arrowType + " as " + dataType().simpleString() + " " + why + ": "
                + stored, false);
    }
}
