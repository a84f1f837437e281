package kera.spark.read;

import com.fasterxml.jackson.databind.node.ArrayNode;
import kera.wire.Planner;
import kera.wire.Position;
import org.apache.spark.sql.connector.read.streaming.PartitionOffset;

/**
 * The progress of a task in real-time mode in its entry.
 *
 * @param position start of a chunk
 * @param record ordinal of the next record; greater than that of the chunk's first record if the place is within it
 */
record KeraPartitionOffset(String stream, int streamlet, int entry, Position position, long record)
        implements PartitionOffset {

    /** The form in which the planner reads it. */
    ArrayNode toJson() {
        ArrayNode json = Planner.JSON.createArrayNode().add(stream).add(streamlet).add(entry);
        return json.addAll(position.toJson()).add(record);
    }
}
