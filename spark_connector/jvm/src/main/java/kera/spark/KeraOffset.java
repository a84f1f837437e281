package kera.spark;

import org.apache.spark.sql.connector.read.streaming.Offset;

/** A place in every entry of a query's streams, as the text that the planner has made. Java does not look into it. */
final class KeraOffset extends Offset {
    private final String json;

    KeraOffset(String json) {
        this.json = json;
    }

    @Override
    public String json() {
        return json;
    }
}
