package kera.wire;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;

/** A range of one entry that a task reads, with everything that it needs for that, as the planner wrote it. */
public final class Piece {

    private static final String DEFAULT_DOMAIN = "default";

    /** Settings of the client and its consumers for reading. */
    record Settings(int fetchBytesMax, long prefetchBytesMax, long requestTimeoutMs, long connectTimeoutMs,
            boolean verifyChecksums, String transport, String consumerGroup, Access access) {
    }

    public final String stream;
    final long streamId;
    public final int streamlet;
    public final int entry;
    public final Position start;
    /** End of the piece; null if it never ends. */
    public final Position end;
    /** Ordinal of the first record to return. */
    public final long firstRecord;
    /** Number of records to return; 0 if the piece never ends. */
    public final long records;
    /** The memory domain that has its chunks at brokers. */
    final String memoryDomain;
    public final boolean typed;
    /** The Arrow IPC schema message of the stream, in the newest version when the piece was planned. */
    public final byte[] schema;
    public final int schemaId;
    /** Start of the last chunk, if the piece ends within it; null if the piece ends at the end of a chunk. */
    public final Position stop;
    /** Ordinal of the first record of that chunk that is not returned. */
    public final long stopRecord;
    /** The epoch of all records; null if rows have no epoch column. */
    public final Long epoch;
    final boolean failOnDataLoss;
    final String sharedMemory;
    /** The connection settings that requests to the service pass on. */
    final JsonNode connection;
    final Settings settings;
    /** The broker that has the start, as far as is known; null if the service has to be asked. */
    final Broker broker;

    /** The versions of the schema before {@link #schema}, by id. */
    private final Map<Integer, byte[]> earlierSchemas = new HashMap<>();

    private Piece(JsonNode node, Token token) {
        stream = node.get("stream").asText();
        streamId = node.get("stream_id").asLong();
        streamlet = node.get("streamlet").asInt();
        entry = node.get("entry").asInt();
        start = Position.parse(node.get("start"));
        end = Position.parse(node.get("end"));
        firstRecord = node.get("first_record").asLong();
        records = node.get("records").asLong();
        memoryDomain = node.path("memory_domain").asText(DEFAULT_DOMAIN);
        typed = node.get("typed").asBoolean();
        schema = Base64.getDecoder().decode(node.get("schema").asText());
        schemaId = node.get("schema_id").asInt();
        node.path("earlier_schemas").properties().forEach(each -> earlierSchemas.put(
                Integer.parseInt(each.getKey()), Base64.getDecoder().decode(each.getValue().asText())));
        JsonNode stopsAt = node.path("stop");
        stop = stopsAt.isArray() ? Position.parse(stopsAt) : null;
        stopRecord = stopsAt.path(3).asLong();
        epoch = node.path("epoch").isIntegralNumber() ? node.get("epoch").asLong() : null;
        failOnDataLoss = node.get("fail_on_data_loss").asBoolean();
        sharedMemory = node.get("shared_memory").asText();
        connection = node.get("connection");
        JsonNode values = node.get("settings");
        settings = new Settings(values.get("fetch_bytes_max").asInt(), values.get("prefetch_bytes_max").asLong(),
                values.get("request_timeout_ms").asLong(), values.get("connect_timeout_ms").asLong(),
                values.get("verify_checksums").asBoolean(), values.get("transport").asText(),
                values.get("consumer_group").asText(), new Access(Tls.parse(values.get("tls")), token));
        broker = Broker.parse(node.get("broker"));
    }

    /**
     * The version of the schema to read chunks of version `id` with; 0 if there is none. Columns that were added since
     * the piece was planned are not known and not wanted: they come after the known columns.
     */
    public int schemaIdFor(int id) {
        if (earlierSchemas.containsKey(id)) {
            return id;
        }
        return Integer.compareUnsigned(id, schemaId) >= 0 ? schemaId : 0;
    }

    /** The Arrow IPC schema message of a version that {@link #schemaIdFor} returned. */
    public byte[] schemaOf(int id) {
        return earlierSchemas.getOrDefault(id, schema);
    }

    /** Parse the JSON text of a piece. {@code token} is the token that the task authenticates with, or null. */
    public static Piece parse(String json, Token token) {
        try {
            return new Piece(Planner.JSON.readTree(json), token);
        } catch (JsonProcessingException error) {
            throw new IllegalArgumentException("not a piece: " + error.getOriginalMessage(), error);
        }
    }
}
