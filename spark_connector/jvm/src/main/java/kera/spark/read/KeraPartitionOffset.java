package kera.spark.read;

import com.fasterxml.jackson.databind.node.ArrayNode;
import kera.wire.Planner;
import kera.wire.Position;
import org.apache.spark.sql.connector.read.streaming.PartitionOffset;

/**
 * Where a task in real-time mode has come to in its entry.
 *
 * @param position of a chunk
 * @param record ordinal of the next record; greater than the chunk's first one if the place is within it
 */
record KeraPartitionOffset(String stream, int streamlet, int entry, Position position, long record)
        implements PartitionOffset {

    /** As the planner reads it. */
    ArrayNode toJson() {
        ArrayNode json = Planner.JSON.createArrayNode().add(stream).add(streamlet).add(entry);
        return json.addAll(position.toJson()).add(record);
    }
}
