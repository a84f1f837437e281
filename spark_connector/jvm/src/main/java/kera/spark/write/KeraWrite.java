package kera.spark.write;

import java.util.Arrays;
import java.util.List;
import java.util.UUID;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import kera.spark.service.KeraAnalysisException;
import kera.spark.service.Service;
import kera.wire.Planner;
import kera.wire.Token;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * A write to a stream by the columnar engine: of a batch, or of one micro-batch (Spark makes one for each).
 *
 * <p>Tasks store rows while they run, each row once. So a commit only reports what happened, and an abort does nothing:
 * stored rows stay, and a repeat finds them. See {@code writing/writers.py}.
 */
public final class KeraWrite implements Write {
    private static final Logger LOG = LoggerFactory.getLogger(KeraWrite.class);
    /** A local property that Spark sets for all jobs of a streaming query. */
    private static final String QUERY_ID = "sql.streaming.queryId";

    private final LogicalWriteInfo info;
    private final boolean overwrite;
    private final String python;

    private KeraWrite(LogicalWriteInfo info, boolean overwrite, String python) {
        this.info = info;
        this.overwrite = overwrite;
        this.python = python;
    }

    /** A builder of writes. {@code otherwise} does the writes that this engine cannot; if it is null, they fail. */
    public static WriteBuilder builder(LogicalWriteInfo info, String python, SupportsWrite otherwise) {
        return new Builder(info, python, otherwise);
    }

    /** Chooses between this engine and {@code otherwise} when Spark builds a write. */
    private static final class Builder implements SupportsTruncate {
        private final LogicalWriteInfo info;
        private final String python;
        private final SupportsWrite otherwise;
        private boolean overwrite;

        Builder(LogicalWriteInfo info, String python, SupportsWrite otherwise) {
            this.info = info;
            this.python = python;
            this.otherwise = otherwise;
        }

        @Override
        public WriteBuilder truncate() {
            overwrite = true; // Python refuses this, with its own text
            return this;
        }

        @Override
        public Write build() {
            if (otherwise == null || canWrite()) {
                return new KeraWrite(info, overwrite, python);
            }
            WriteBuilder builder = otherwise.newWriteBuilder(info);
            return overwrite ? ((SupportsTruncate) builder).truncate().build() : builder.build();
        }

        private boolean canWrite() {
            return KeraAnalysisException.translating(() -> Service.shared(python).call("can_write", params(info)))
                    .get("can").asBoolean();
        }
    }

    @Override
    public String description() {
        return "KeraWrite columnar";
    }

    @Override
    public BatchWrite toBatch() {
        return new Batch();
    }

    @Override
    public StreamingWrite toStreaming() {
        return new Streaming();
    }

    /** {@code query}: the id of a streaming query; null for a batch, named {@code name} unless its options name it. */
    private KeraWriterFactory factory(String query, String name, int partitions) {
        ObjectNode params = params(info).put("overwrite", overwrite).put("query", query).put("name", name)
                .put("partitions", partitions);
        JsonNode opened = KeraAnalysisException.translating(() -> Service.shared(python).call("open_write", params));
        long[] producerIds = new long[partitions];
        Arrays.setAll(producerIds, partition -> opened.get("producer_ids").get(partition).asLong());
        Token token = Token.parse(opened.path("token"));
        StructType columns = named(opened.get("columns"));
        ((ObjectNode) opened).remove(List.of("producer_ids", "token", "columns"));
        return new KeraWriterFactory(
                columns, opened.toString(), token, producerIds, opened.get("version").asLong(), python);
    }

    /** The columns with the stream's spelling of their names, which may differ in case. */
    private StructType named(JsonNode names) {
        StructField[] given = info.schema().fields();
        StructField[] fields = new StructField[given.length];
        Arrays.setAll(fields, at -> new StructField(
                names.get(at).asText(), given[at].dataType(), given[at].nullable(), given[at].metadata()));
        return new StructType(fields);
    }

    private static ObjectNode params(LogicalWriteInfo info) {
        ObjectNode params = Planner.JSON.createObjectNode().put("schema", info.schema().json())
                .put("case_sensitive", SQLConf.get().caseSensitiveAnalysis());
        info.options().forEach(params.putObject("options")::put);
        return params;
    }

    private static void report(WriterCommitMessage[] messages, String about) {
        long surplus = 0;
        for (WriterCommitMessage message : messages) {
            surplus += message instanceof KeraWritten written ? written.surplus() : 0;
        }
        if (surplus > 0) {
            LOG.warn("earlier attempts have stored rows that the last one did not have: the query is not deterministic,"
                    + " or its partitions were cut in another way. No row is missing; some may be there more than once:"
                    + " {} rows{}", surplus, about);
        }
    }

    /** The write of a DataFrame, once. */
    private final class Batch implements BatchWrite {
        private final String name = UUID.randomUUID().toString().replace("-", "");

        @Override
        public KeraWriterFactory createBatchWriterFactory(PhysicalWriteInfo physical) {
            return factory(null, name, physical.numPartitions());
        }

        @Override
        public void commit(WriterCommitMessage[] messages) {
            report(messages, "");
        }

        @Override
        public void abort(WriterCommitMessage[] messages) {
            // Stored rows stay.
        }
    }

    /** The write of a micro-batch, exactly once. */
    private final class Streaming implements StreamingWrite {

        @Override
        public KeraWriterFactory createStreamingWriterFactory(PhysicalWriteInfo physical) {
            String query = SparkSession.active().sparkContext().getLocalProperty(QUERY_ID);
            if (query == null) {
                throw new IllegalStateException("Spark tells the jobs of a streaming query its id");
            }
            return factory(query, "", physical.numPartitions());
        }

        @Override
        public void commit(long epochId, WriterCommitMessage[] messages) {
            report(messages, " of batch " + epochId);
        }

        @Override
        public void abort(long epochId, WriterCommitMessage[] messages) {
            // Stored rows stay.
        }
    }
}
