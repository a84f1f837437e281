package kera.spark;

import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** Spark's table of the Python data source. Its options tell the data source that Python is meant to read. */
final class KeraPythonTable extends PythonTable {
    KeraPythonTable(PythonDataSourceV2 source, String shortName, StructType schema) {
        super(source, shortName, schema);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
        return super.newScanBuilder(KeraSource.forPython(options));
    }
}
