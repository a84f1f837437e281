package kera.wire;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;

import com.fasterxml.jackson.databind.JsonNode;

/** A broker and its addresses; an address is empty if the broker does not offer it. */
record Broker(int brokerId, String nodeId, String framesAddress, String framesUnixPath, String pushUnixPath) {

    /** The same as {@code kera.core.base.process.node_id}. */
    private static final String THIS_NODE = kernel("hostname", "") + "/" + kernel("random/boot_id", "unknown-boot");

    /** Parse the JSON form; null for null. */
    static Broker parse(JsonNode node) {
        return node == null || node.isNull() ? null
                : new Broker(node.get("broker_id").asInt(), node.path("node_id").asText(),
                        node.path("frames_address").asText(), node.path("frames_unix_path").asText(),
                        node.path("push_unix_path").asText());
    }

    /** Whether the broker is on this node, so that its unix sockets can be reached. */
    boolean isOnThisNode() {
        return nodeId.equals(THIS_NODE);
    }

    private static String kernel(String name, String otherwise) {
        try {
            return Files.readString(Path.of("/proc/sys/kernel", name)).strip();
        } catch (IOException error) {
            return otherwise;
        }
    }
}
