package kera.columns;

import org.apache.spark.sql.types.DataTypes;

/** The ordinals of records within their entry. */
final class OrdinalColumn extends OwnColumn {
    private long first;

    OrdinalColumn() {
        super(DataTypes.LongType);
    }

    /** Begin a batch whose first record has the ordinal `first`. */
    void begin(long first) {
        this.first = first;
    }

    @Override
    public long getLong(int row) {
        return first + row;
    }
}
