package kera.wire;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import java.io.Serializable;

/** A place in an entry: the start of a chunk, in bytes from the start of a segment of a group. */
public record Position(long group, int segment, int offset) implements Comparable<Position>, Serializable {

    /** Parse {@code [group, segment, offset]}; null for null. */
    static Position parse(JsonNode node) {
        return node == null || node.isNull() ? null
                : new Position(node.get(0).asLong(), node.get(1).asInt(), node.get(2).asInt());
    }

    public ArrayNode toJson() {
        return JsonNodeFactory.instance.arrayNode().add(group).add(segment).add(offset);
    }

    /** The place {@code bytes} bytes after this one, in the same segment. */
    Position plus(int bytes) {
        return new Position(group, segment, Math.addExact(offset, bytes));
    }

    boolean isBefore(Position other) {
        return compareTo(other) < 0;
    }

    @Override
    public int compareTo(Position other) {
        int order = Long.compare(group, other.group);
        if (order == 0) {
            order = Integer.compare(segment, other.segment);
        }
        return order == 0 ? Integer.compare(offset, other.offset) : order;
    }

    /** The text that the Python engine also uses in messages. */
    @Override
    public String toString() {
        return "(" + group + ", " + segment + ", " + offset + ")";
    }
}
