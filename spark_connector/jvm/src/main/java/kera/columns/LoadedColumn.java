package kera.columns;

import org.apache.spark.sql.vectorized.ColumnVector;

/** A column that is loaded from one field of a record batch, anew for every chunk. */
interface LoadedColumn extends FieldLoader {
    /** The column, always the same object. */
    ColumnVector column();
}
