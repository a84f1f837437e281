package kera.spark.read;

import java.util.Arrays;
import java.util.HashSet;
import java.util.Set;

import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/** Takes the columns that a query uses out of those that there are. A column is taken whole, with all its fields. */
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
     * Has Spark copy rows that Python functions are evaluated on. It would keep their batch instead, until they have
     * been, and take others meanwhile: but a batch of ours is valid until the next one only. Results would stand beside
     * the columns of other rows.
     */
    private static void copyForPython() {
        SparkSession.active().conf().set(PYTHON_KEEPS_COLUMNS, false);
    }
}
