package kera.wire;

import java.nio.ByteBuffer;
import java.util.zip.CRC32C;

import com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.arrow.memory.util.MemoryUtil;

/** Shows programs of other packages the package-private state of readers and chunks. */
public final class Told {
    private Told() {
    }

    /** The chunk's positions, counts, checksum and memory; its payload must be at its address. */
    public static ObjectNode of(Chunk chunk) {
        byte[] payload = new byte[chunk.payloadBytes];
        chunk.memory.get(Chunk.HEADER_BYTES, payload);
        for (int at = 0; at < payload.length; at++) {
            if (payload[at] != MemoryUtil.getByte(chunk.payloadAddress + at)) {
                throw new AssertionError("the payload is not at its address");
            }
        }
        CRC32C crc = new CRC32C();
        crc.update(payload);
        crc.update(ByteBuffer.allocate(chunk.chunkBytes() - Chunk.HEADER_BYTES - payload.length)); // the padding
        ObjectNode node = Planner.JSON.createObjectNode();
        node.set("start", chunk.start.toJson());
        node.set("next", chunk.next.toJson());
        return node.put("first_record", chunk.firstRecord).put("records", chunk.recordCount)
                .put("bytes", chunk.chunkBytes()).put("crc", crc.getValue()).put("in_place", chunk.inPlace)
                .put("intact", chunk.intact());
    }

    /** Whether the reader has given all records of its piece. */
    public static boolean hasEnded(PieceReader reader) {
        return reader.ended();
    }
}
