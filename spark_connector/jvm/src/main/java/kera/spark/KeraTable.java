package kera.spark;

import java.util.EnumSet;
import java.util.Set;

import kera.spark.read.KeraQuery;
import kera.spark.read.KeraScanBuilder;
import kera.spark.service.Service;
import kera.spark.write.KeraWrite;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** A table that the columnar engine may read and write; if it cannot run, or is not meant to, the Python table does. */
final class KeraTable implements SupportsRead, SupportsWrite {
    private final StructType columns;
    private final KeraPythonTable pythonTable;

    KeraTable(StructType columns, KeraPythonTable pythonTable) {
        this.columns = columns;
        this.pythonTable = pythonTable;
    }

    @Override
    public String name() {
        return KeraSource.NAME;
    }

    @Override
    public Column[] columns() {
        return pythonTable.columns();
    }

    @Override
    public Set<TableCapability> capabilities() {
        return EnumSet.of(
                TableCapability.BATCH_READ,
                TableCapability.BATCH_WRITE,
                TableCapability.MICRO_BATCH_READ,
                TableCapability.STREAMING_WRITE,
                TableCapability.TRUNCATE);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
        if (!KeraSource.isColumnar(options)) {
            return pythonTable.newScanBuilder(options);
        }
        return new KeraScanBuilder(new KeraQuery(options, columns, columns, Service.driverPython()));
    }

    @Override
    public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
        if (!KeraSource.isColumnarWrite(info.options())) {
            return pythonTable.newWriteBuilder(info);
        }
        boolean required = KeraSource.requiresColumnar(info.options());
        return KeraWrite.builder(info, Service.driverPython(), required ? null : pythonTable);
    }
}
