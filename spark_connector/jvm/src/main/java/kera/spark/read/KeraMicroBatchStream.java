package kera.spark.read;

import java.util.HashMap;
import java.util.Map;
import java.util.Optional;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import kera.spark.service.KeraAnalysisException;
import kera.spark.service.ServiceProcess;
import kera.wire.KeraException;
import kera.wire.Planner;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.PartitionOffset;
import org.apache.spark.sql.connector.read.streaming.ReadAllAvailable;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.ReadMaxBytes;
import org.apache.spark.sql.connector.read.streaming.ReadMaxRows;
import org.apache.spark.sql.connector.read.streaming.ReadMinRows;
import org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics;
import org.apache.spark.sql.connector.read.streaming.SupportsRealTimeMode;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Growing streams, in micro-batches or in real-time mode: this class passes each question of Spark on to a reader that
 * the planner keeps.
 *
 * <p>The first question opens that reader. If the planner's process has ended, the reader is opened again, and the
 * question repeated: Spark keeps the offsets, and this object keeps the rest of the state. Spark asks from one thread
 * at a time.
 */
final class KeraMicroBatchStream
        implements MicroBatchStream, SupportsTriggerAvailableNow, SupportsRealTimeMode, ReportsSourceMetrics {
    /** How often a question is asked if one process after the other ends before it answers. */
    private static final int ATTEMPTS = 3;
    /** Short: the planner may still work on an interrupted question, and closes the reader after it anyway. */
    private static final long CLOSE_TIMEOUT_MS = 2_000;

    private static final Logger LOG = LoggerFactory.getLogger(KeraMicroBatchStream.class);

    /** A place in every entry of a query's streams: text from the planner, which Java does not interpret. */
    private static final class KeraOffset extends Offset {
        private final String json;

        KeraOffset(String json) {
            this.json = json;
        }

        @Override
        public String json() {
            return json;
        }
    }

    private final KeraQuery query;
    private final KeraScan scan;
    private ServiceProcess process;
    private long handle;
    private String initial;
    private boolean availableNow;
    private boolean realTime;
    /** The start of the current micro-batch in real-time mode. */
    private String realTimeStart;
    /** The number of missing cores when it was last computed, so that the warning is not repeated. */
    private int coresMissing;

    KeraMicroBatchStream(KeraQuery query, KeraScan scan) {
        this.query = query;
        this.scan = scan;
    }

    // -- start and end -----------------------------------------------------------------------------------------

    @Override
    public Offset initialOffset() {
        if (initial == null) {
            initial = ask("initial_offset", params()).path("offset").asText();
        }
        return new KeraOffset(initial);
    }

    @Override
    public Offset deserializeOffset(String json) {
        return new KeraOffset(json);
    }

    @Override
    public ReadLimit getDefaultReadLimit() {
        JsonNode limit = ask("read_limit", params()).path("limit");
        long value = limit.path("value").asLong();
        return switch (limit.path("type").asText()) {
            case "max_rows" -> ReadLimit.maxRows(value);
            case "max_bytes" -> ReadLimit.maxBytes(value);
            case "min_rows" -> ReadLimit.minRows(value, 0); // the planner knows the maximum wait
            default -> ReadLimit.allAvailable();
        };
    }

    @Override
    public void prepareForTriggerAvailableNow() {
        ask("prepare_available_now", params());
        availableNow = true;
    }

    @Override
    public Offset latestOffset() {
        throw new UnsupportedOperationException("latestOffset(Offset, ReadLimit) should be called instead");
    }

    @Override
    public Offset latestOffset(Offset start, ReadLimit limit) {
        if (realTime) { // the end is not known yet, but Spark asks anyway
            return start;
        }
        return latest(start, limit);
    }

    private Offset latest(Offset start, ReadLimit limit) {
        ObjectNode params = params().put("start", start.json());
        params.set("limit", limitToJson(limit));
        return new KeraOffset(ask("latest_offset", params).path("offset").asText());
    }

    private static ObjectNode limitToJson(ReadLimit limit) {
        ObjectNode json = Planner.JSON.createObjectNode();
        if (limit instanceof ReadMaxRows rows) {
            return json.put("type", "max_rows").put("value", rows.maxRows());
        }
        if (limit instanceof ReadMaxBytes bytes) {
            return json.put("type", "max_bytes").put("value", bytes.maxBytes());
        }
        if (limit instanceof ReadMinRows rows) {
            return json.put("type", "min_rows").put("value", rows.minRows());
        }
        if (limit instanceof ReadAllAvailable) {
            return json.put("type", "all");
        }
        throw new IllegalArgumentException("a limit that was not asked for: " + limit);
    }

    /** The current end of the streams, regardless of read limits; null while it is not known. */
    @Override
    public Offset reportLatestOffset() {
        JsonNode offset = ask("report_latest_offset", params()).path("offset");
        return offset.isTextual() ? new KeraOffset(offset.asText()) : null;
    }

    /** The metrics in the query's progress. They are empty if the planner fails: that should not end the query. */
    @Override
    public Map<String, String> metrics(Optional<Offset> consumed) {
        Map<String, String> metrics = new HashMap<>();
        try {
            if (realTime && consumed.isPresent()) { // the planner last looked when the micro-batch began
                latest(consumed.get(), ReadLimit.allAvailable());
            }
            JsonNode found = ask("metrics", params().put("consumed", consumed.map(Offset::json).orElse(null)));
            found.path("metrics").forEachEntry((name, value) -> metrics.put(name, value.asText()));
        } catch (Exception error) {
            if (!(error instanceof KeraAnalysisException)) {
                throw error;
            }
            LOG.warn("the planner does not know the metrics of {}: {}", query.streams(), error.getMessage());
        }
        return metrics;
    }

    // -- reading -----------------------------------------------------------------------------------------------

    @Override
    public InputPartition[] planInputPartitions(Offset start, Offset end) {
        return KeraQuery.partitions(ask("plan", params().put("start", start.json()).put("end", end.json())));
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
        return query.readerFactory();
    }

    // -- real-time mode ----------------------------------------------------------------------------------------

    @Override
    public void prepareForRealTimeMode() {
        realTime = true;
        scan.prepareForRealTimeMode();
    }

    /** One partition without an end for each existing entry. */
    @Override
    public InputPartition[] planInputPartitions(Offset start) {
        realTimeStart = start.json();
        InputPartition[] planned =
                KeraQuery.partitions(ask("plan_real_time", params().put("start", realTimeStart)));
        warnOfCores(planned.length);
        return planned;
    }

    /** Warn if cores are missing: a task that waits for a core until time is up reads nothing; always the same wait. */
    private void warnOfCores(int entries) {
        int cores = SparkSession.active().sparkContext().defaultParallelism();
        int missing = Math.max(0, entries - cores);
        if (missing > 0 && missing != coresMissing) {
            LOG.warn("real-time mode needs a core for each of the {} entries of {} at the same time, and Spark seems to"
                    + " have {}: {} of them are not read", entries, query.streams(), cores, missing);
        }
        coresMissing = missing;
    }

    @Override
    public Offset mergeOffsets(PartitionOffset[] places) {
        ObjectNode params = params().put("start", realTimeStart);
        ArrayNode array = params.putArray("places");
        for (PartitionOffset place : places) {
            array.add(((KeraPartitionOffset) place).toJson());
        }
        return new KeraOffset(ask("merge", params).path("offset").asText());
    }

    // -- commit and stop ---------------------------------------------------------------------------------------

    @Override
    public void commit(Offset end) {
        ask("commit", params().put("end", end.json()));
    }

    @Override
    public void stop() {
        if (process == null) {
            return;
        }
        try {
            process.call("close", params().put("stream", handle), CLOSE_TIMEOUT_MS);
        } catch (KeraException error) {
            LOG.debug("the planner's reader is not closed yet, or its process has ended", error);
        }
        process = null;
    }

    /** The name of the source in the query's progress. */
    @Override
    public String toString() {
        return "Kera[" + query.streams() + "]";
    }

    // -- helpers -----------------------------------------------------------------------------------------------

    private static ObjectNode params() {
        return Planner.JSON.createObjectNode();
    }

    private JsonNode ask(String method, ObjectNode params) {
        return KeraAnalysisException.translating(() -> {
            for (int attempt = 1; ; attempt++) {
                try {
                    open();
                    return process.call(method, params.put("stream", handle));
                } catch (ServiceProcess.Ended ended) {
                    process = null;
                    if (attempt == ATTEMPTS) {
                        throw ended;
                    }
                    LOG.warn("{}; its reader of {} is opened again", ended.getMessage(), query.streams());
                }
            }
        });
    }

    private void open() {
        if (process != null) {
            return;
        }
        ServiceProcess opening = query.service().process();
        ObjectNode params = query.params();
        if (initial != null) {
            params.put("initial", initial);
        }
        long opened = opening.call("open", params).path("stream").asLong();
        handle = opened;
        process = opening;
        if (availableNow) { // the new reader takes its end from now, later than the first did, but it has one
            try {
                process.call("prepare_available_now", params().put("stream", handle));
            } catch (KeraException error) {
                stop();
                throw error;
            }
        }
    }
}
