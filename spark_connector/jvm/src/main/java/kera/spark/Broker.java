package kera.spark;

import com.fasterxml.jackson.databind.JsonNode;

/** A broker, and where it can be reached; an empty address is one that it does not offer. */
record Broker(int brokerId, String nodeId, String framesAddress, String framesUnixPath, String pushUnixPath) {

    /** From its JSON; null of null. */
    static Broker parse(JsonNode node) {
        return node == null || node.isNull() ? null
                : new Broker(node.get("broker_id").asInt(), node.path("node_id").asText(),
                        node.path("frames_address").asText(), node.path("frames_unix_path").asText(),
                        node.path("push_unix_path").asText());
    }
}
