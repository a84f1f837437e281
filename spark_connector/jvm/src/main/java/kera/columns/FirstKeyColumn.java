package kera.columns;

import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.vectorized.ColumnVector;

/** The first key of each record, or null if it has none. */
final class FirstKeyColumn extends OwnColumn {
    private final ListColumn keys;
    private final ColumnVector each;
    private int rows;

    FirstKeyColumn(ListColumn keys) {
        super(DataTypes.BinaryType);
        this.keys = keys;
        each = keys.getChild(0);
    }

    /** Begin a batch of `rows` rows. */
    void begin(int rows) {
        this.rows = rows;
    }

    @Override
    public boolean isNullAt(int row) {
        if (keys.isNullAt(row)) {
            return true;
        }
        int first = keys.start(row);
        return keys.start(row + 1) == first || each.isNullAt(first);
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
    public byte[] getBinary(int row) {
        return isNullAt(row) ? null : each.getBinary(keys.start(row));
    }
}
