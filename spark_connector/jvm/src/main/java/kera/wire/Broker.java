package kera.wire;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;

import com.fasterxml.jackson.databind.JsonNode;

/** A broker, and where it can be reached; an empty address is one that it does not offer. */
record Broker(int brokerId, String nodeId, String framesAddress, String framesUnixPath, String pushUnixPath) {

    /** As {@code kera.core.base.process.node_id} has it. */
    private static final String THIS_NODE = kernel("hostname", "") + "/" + kernel("random/boot_id", "unknown-boot");

    /** From its JSON; null of null. */
    static Broker parse(JsonNode node) {
        return node == null || node.isNull() ? null
                : new Broker(node.get("broker_id").asInt(), node.path("node_id").asText(),
                        node.path("frames_address").asText(), node.path("frames_unix_path").asText(),
                        node.path("push_unix_path").asText());
    }

    /** Whether it can be reached by paths of this one's file system. */
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
