package kera.spark.read;

import kera.spark.service.KeraAnalysisException;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;

/** A batch with everything that the streams hold when it is planned; it is planned once. */
final class KeraBatch implements Batch {
    private final KeraQuery query;
    private InputPartition[] planned;

    KeraBatch(KeraQuery query) {
        this.query = query;
    }

    @Override
    public synchronized InputPartition[] planInputPartitions() {
        if (planned == null) {
            int parallelism = SparkSession.active().sparkContext().defaultParallelism();
            planned = KeraQuery.partitions(KeraAnalysisException.translating(
                    () -> query.service().call("plan_batch", query.params().put("parallelism", parallelism))));
        }
        return planned;
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
        return query.readerFactory();
    }
}
