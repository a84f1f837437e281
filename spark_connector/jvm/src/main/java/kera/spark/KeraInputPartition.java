package kera.spark;

import org.apache.spark.sql.connector.read.InputPartition;

/** What one task reads: a piece of an entry, as the planner has written it, and the hosts where it is in memory. */
final class KeraInputPartition implements InputPartition {
    private static final long serialVersionUID = 1L;

    private final String piece;
    private final String[] hosts;

    KeraInputPartition(String piece, String[] hosts) {
        this.piece = piece;
        this.hosts = hosts;
    }

    /** The piece as JSON, see {@link Piece#parse}. */
    String piece() {
        return piece;
    }

    @Override
    public String[] preferredLocations() {
        return hosts;
    }
}
