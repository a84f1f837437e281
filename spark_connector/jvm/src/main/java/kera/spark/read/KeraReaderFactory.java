package kera.spark.read;

import kera.spark.service.Service;
import kera.wire.Piece;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** Makes the readers of tasks; Spark sends it to the executors. */
final class KeraReaderFactory implements PartitionReaderFactory {
    private static final long serialVersionUID = 1L;

    private final StructType wanted;
    private final String driverPython;

    KeraReaderFactory(StructType wanted, String driverPython) {
        this.wanted = wanted;
        this.driverPython = driverPython;
    }

    @Override
    public boolean supportColumnarReads(InputPartition partition) {
        return true;
    }

    @Override
    public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
        return columnarReader(((KeraInputPartition) partition).piece());
    }

    /** Make a reader of rows, which only real-time mode uses. */
    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
        Piece piece = ((KeraInputPartition) partition).piece();
        UnsafeProjection copy = UnsafeProjection.create(wanted);
        return new KeraRealTimeReader(piece, copy, columnarReader(piece));
    }

    private KeraColumnarReader columnarReader(Piece piece) {
        return new KeraColumnarReader(piece, wanted, () -> Service.shared(Service.executorPython(driverPython)));
    }
}
