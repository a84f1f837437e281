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

    /** Said here, so that Spark does not plan the partitions to ask each of them. Real-time mode takes rows. */
    @Override
    public ColumnarSupportMode columnarSupportMode() {
        return realTime ? ColumnarSupportMode.UNSUPPORTED : ColumnarSupportMode.SUPPORTED;
    }

    /** From now on this scan is for real-time mode. */
    void prepareForRealTimeMode() {
        realTime = true;
    }

    /** Always the same one: copies of a plan read the same records. */
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
