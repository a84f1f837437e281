package kera.columns;

import org.apache.spark.sql.vectorized.ColumnVector;

/** A column that is made of one field of a chunk's record batch, again for every chunk. */
interface LoadedColumn extends FieldLoader {
    /** The column itself; always the same one. */
    ColumnVector column();
}
