package kera.spark.read;

import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.types.StructType;

/** A read of streams by the columnar engine. */
final class KeraScan implements Scan {
    private final KeraQuery query;
    private KeraBatch batch;
    private volatile boolean realTime;

    KeraScan(KeraQuery query) {
        this.query = query;
    }

    @Override
    public StructType readSchema() {
        return query.wanted();
    }

    @Override
    public String description() {
        return "KeraScan columnar " + query.streams();
    }

    /** Answered here, so that Spark does not plan the partitions to ask each of them. Real-time mode needs rows. */
    @Override
    public ColumnarSupportMode columnarSupportMode() {
        return realTime ? ColumnarSupportMode.UNSUPPORTED : ColumnarSupportMode.SUPPORTED;
    }

    /** Use this scan for real-time mode from now on. */
    void prepareForRealTimeMode() {
        realTime = true;
    }

    /** Always the same batch, so that copies of a plan read the same records. */
    @Override
    public synchronized Batch toBatch() {
        if (batch == null) {
            batch = new KeraBatch(query);
        }
        return batch;
    }

    @Override
    public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
        return new KeraMicroBatchStream(query, this);
    }

    @Override
    public CustomMetric[] supportedCustomMetrics() {
        return KeraMetrics.all();
    }
}
