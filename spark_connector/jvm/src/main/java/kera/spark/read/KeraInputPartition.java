package kera.spark.read;

import kera.wire.Piece;
import kera.wire.Token;
import org.apache.spark.sql.connector.read.InputPartition;

/**
 * What one task reads: a piece of an entry, as the planner has written it, and the hosts where it is in memory; and
 * what shows brokers who the task is, which is nowhere but here: Spark shows nothing of a partition.
 */
final class KeraInputPartition implements InputPartition {
    private static final long serialVersionUID = 1L;

    private final String piece;
    private final Token token;
    private final String[] hosts;

    /** {@code token} or null. */
    KeraInputPartition(String piece, Token token, String[] hosts) {
        this.piece = piece;
        this.token = token;
        this.hosts = hosts;
    }

    Piece piece() {
        return Piece.parse(piece, token);
    }

    @Override
    public String[] preferredLocations() {
        return hosts;
    }
}
