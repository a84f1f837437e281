package kera.spark;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.Base64;

/** A range of one entry that a task reads, with all it has to know for that; as the planner has written it. */
final class Piece {

    private static final ObjectMapper JSON = new ObjectMapper();

    /** How to read: settings of the client and its consumers. */
    record Settings(int fetchBytesMax, long prefetchBytesMax, long requestTimeoutMs, long connectTimeoutMs,
            boolean verifyChecksums, String transport, String applicationId) {
    }

    public final String stream;
    public final long streamId;
    public final int streamlet;
    public final int entry;
    public final Position start;
    /** Null: it never ends. */
    public final Position end;
    /** Ordinal of the first record to give. */
    public final long firstRecord;
    /** How many it has to give; 0 if it never ends. */
    public final long records;
    public final boolean typed;
    /** The Arrow IPC schema message of the stream. */
    public final byte[] schema;
    public final int schemaId;
    public final boolean failOnDataLoss;
    public final String sharedMemory;
    public final String bootstrap;
    public final Settings settings;
    /** Who has the start, as far as is known; null: the service has to be asked. */
    public final Broker broker;

    private Piece(JsonNode node) {
        stream = node.get("stream").asText();
        streamId = node.get("stream_id").asLong();
        streamlet = node.get("streamlet").asInt();
        entry = node.get("entry").asInt();
        start = Position.parse(node.get("start"));
        end = Position.parse(node.get("end"));
        firstRecord = node.get("first_record").asLong();
        records = node.get("records").asLong();
        typed = node.get("typed").asBoolean();
        schema = Base64.getDecoder().decode(node.get("schema").asText());
        schemaId = node.get("schema_id").asInt();
        failOnDataLoss = node.get("fail_on_data_loss").asBoolean();
        sharedMemory = node.get("shared_memory").asText();
        bootstrap = node.get("bootstrap").asText();
        JsonNode values = node.get("settings");
        settings = new Settings(values.get("fetch_bytes_max").asInt(), values.get("prefetch_bytes_max").asLong(),
                values.get("request_timeout_ms").asLong(), values.get("connect_timeout_ms").asLong(),
                values.get("verify_checksums").asBoolean(), values.get("transport").asText(),
                values.get("application_id").asText());
        broker = Broker.parse(node.get("broker"));
    }

    /** From its JSON text. */
    static Piece parse(String json) {
        try {
            return new Piece(JSON.readTree(json));
        } catch (JsonProcessingException error) {
            throw new IllegalArgumentException("not a piece: " + error.getOriginalMessage(), error);
        }
    }
}
