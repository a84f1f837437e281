package kera.wire;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;

/** A range of one entry that a task reads, with all it has to know for that; as the planner has written it. */
public final class Piece {

    private static final String DEFAULT_DOMAIN = "default";

    /** How to read: settings of the client and its consumers. */
    record Settings(int fetchBytesMax, long prefetchBytesMax, long requestTimeoutMs, long connectTimeoutMs,
            boolean verifyChecksums, String transport, String consumerGroup, Access access) {
    }

    public final String stream;
    final long streamId;
    public final int streamlet;
    public final int entry;
    public final Position start;
    /** Null: it never ends. */
    public final Position end;
    /** Ordinal of the first record to give. */
    public final long firstRecord;
    /** How many it has to give; 0 if it never ends. */
    public final long records;
    /** In whose memory its chunks are, at brokers. */
    final String memoryDomain;
    public final boolean typed;
    /** The Arrow IPC schema message of the stream: the newest version when this was planned. */
    public final byte[] schema;
    public final int schemaId;
    /** Where the piece ends within its last chunk: where that one starts. Null: at the end of a chunk. */
    public final Position stop;
    /** Ordinal of the first record of that chunk that is not to be given. */
    public final long stopRecord;
    /** The epoch of all of it; null: rows do not tell it. */
    public final Long epoch;
    final boolean failOnDataLoss;
    final String sharedMemory;
    /** How the service connects that is asked about it, as it is to be told. */
    final JsonNode connection;
    final Settings settings;
    /** Who has the start, as far as is known; null: the service has to be asked. */
    final Broker broker;

    /** The versions of the schema before {@link #schema}, by their ids. */
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
     * The version of the schema to read chunks with that name `id`; 0: there is none. Of columns that were added since
     * the piece was planned nothing is known, nor wanted: they come behind those that are known.
     */
    public int schemaIdFor(int id) {
        if (earlierSchemas.containsKey(id)) {
            return id;
        }
        return Integer.compareUnsigned(id, schemaId) >= 0 ? schemaId : 0;
    }

    /** The Arrow IPC schema message of a version that {@link #schemaIdFor} has given. */
    public byte[] schemaOf(int id) {
        return earlierSchemas.getOrDefault(id, schema);
    }

    /** From its JSON text. {@code token} or null: what the task shows of who it is. */
    public static Piece parse(String json, Token token) {
        try {
            return new Piece(Planner.JSON.readTree(json), token);
        } catch (JsonProcessingException error) {
            throw new IllegalArgumentException("not a piece: " + error.getOriginalMessage(), error);
        }
    }
}
