package kera.spark.read;

import java.util.Arrays;
import java.util.HashSet;
import java.util.Set;

import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/** Selects the columns that a query uses. A column is read whole, with all its fields. */
public final class KeraScanBuilder implements SupportsPushDownRequiredColumns {
    private static final String PYTHON_KEEPS_COLUMNS = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled";

    private KeraQuery query;

    public KeraScanBuilder(KeraQuery query) {
        this.query = query;
    }

    @Override
    public void pruneColumns(StructType required) {
        Set<String> names = new HashSet<>(Arrays.asList(required.fieldNames()));
        query = query.withWanted(new StructType(Arrays.stream(query.columns().fields())
                .filter(field -> names.contains(field.name()))
                .toArray(StructField[]::new)));
    }

    @Override
    public Scan build() {
        copyForPython();
        return new KeraScan(query);
    }

    /**
     * Make Spark copy the rows that it passes to Python functions. Otherwise it would keep their batch until the
     * functions have run, and fetch other batches meanwhile. But a batch is valid only until the next one, so results
     * would end up next to the columns of other rows.
     */
    private static void copyForPython() {
        SparkSession.active().conf().set(PYTHON_KEEPS_COLUMNS, false);
    }
}
