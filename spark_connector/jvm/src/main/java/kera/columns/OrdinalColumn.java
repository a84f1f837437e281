package kera.columns;

import org.apache.spark.sql.types.DataTypes;

/** The ordinals of records in their entry. */
final class OrdinalColumn extends OwnColumn {
    private long first;

    OrdinalColumn() {
        super(DataTypes.LongType);
    }

    /** From `first` on. */
    void begin(long first) {
        this.first = first;
    }

    @Override
    public long getLong(int row) {
        return first + row;
    }
}
