package kera.wire;

import java.util.HashMap;
import java.util.Map;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;

/**
 * The stream that rows are written to, as {@code open_write} of {@code service/writes.py} describes it.
 *
 * @param connection the connection settings that requests to the service pass on
 * @param chunkBytes size up to which rows are gathered; a chunk of several rows is at most twice as large
 * @param chunkBytesMax maximum size of a chunk
 * @param epochUs duration of the stream's epochs; 0 if it has none
 * @param latencyTargetMs maximum time until a row is stored after its task has it; 0 if rows are only stored when their
 *     chunk is full or the task ends
 * @param room the limit that a record has to fit into, in words
 * @param owners the broker of each streamlet, as far as is known; updated in place
 */
public record WriteTarget(JsonNode connection, String stream, long streamId, int schemaId, int codec, int streamlets,
        int chunkBytes, long chunkBytesMax, long epochUs, long latencyTargetMs, String room, long requestTimeoutMs,
        long connectTimeoutMs, String transport, Access access, Map<Integer, Broker> brokers, int[] owners) {

    /** Parse the JSON text. {@code token} is the token that the task authenticates with, or null. */
    public static WriteTarget parse(String json, Token token) {
        try {
            JsonNode node = Planner.JSON.readTree(json);
            int streamlets = node.get("streamlets").asInt();
            WriteTarget made = new WriteTarget(node.get("connection"), node.get("stream").asText(),
                    node.get("stream_id").asLong(), node.get("schema_id").asInt(), node.get("codec").asInt(),
                    streamlets, node.get("chunk_bytes").asInt(), node.get("chunk_bytes_max").asLong(),
                    node.get("epoch_us").asLong(), node.path("latency_target_ms").asLong(0),
                    node.get("room").asText(), node.get("request_timeout_ms").asLong(),
                    node.get("connect_timeout_ms").asLong(), node.get("transport").asText(),
                    new Access(Tls.parse(node.get("tls")), token), new HashMap<>(),
                    new int[streamlets]);
            for (int streamlet = 0; streamlet < streamlets; streamlet++) {
                made.owners[streamlet] = node.get("owners").get(streamlet).asInt();
            }
            made.learn(node);
            return made;
        } catch (JsonProcessingException error) {
            throw new IllegalArgumentException("not a stream to write to: " + error.getOriginalMessage(), error);
        }
    }

    /** Remember the addresses of the brokers in an answer of the service. */
    void learn(JsonNode answer) {
        for (JsonNode each : answer.get("brokers")) {
            Broker broker = Broker.parse(each);
            brokers.put(broker.brokerId(), broker);
        }
    }

    Broker owner(int streamlet) {
        return brokers.get(owners[streamlet]);
    }
}
