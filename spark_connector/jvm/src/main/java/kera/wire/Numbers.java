package kera.wire;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Base64;

import com.fasterxml.jackson.databind.JsonNode;

/** Decodes arrays from the service's JSON: little-endian, in base64. */
final class Numbers {

    private Numbers() {
    }

    static byte[] bytes(JsonNode text) {
        return Base64.getDecoder().decode(text.asText());
    }

    static int[] ints(JsonNode text) {
        byte[] bytes = bytes(text);
        int[] found = new int[bytes.length / Integer.BYTES];
        ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN).asIntBuffer().get(found);
        return found;
    }

    static long[] longs(JsonNode text) {
        byte[] bytes = bytes(text);
        long[] found = new long[bytes.length / Long.BYTES];
        ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN).asLongBuffer().get(found);
        return found;
    }
}
