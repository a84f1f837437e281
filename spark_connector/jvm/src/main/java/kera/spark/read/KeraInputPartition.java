package kera.spark.read;

import kera.wire.Piece;
import kera.wire.Token;
import org.apache.spark.sql.connector.read.InputPartition;

/**
 * The input of one task: a piece of an entry, as the planner wrote it, the hosts that have it in memory, and the token
 * with which the task authenticates to brokers. The token is kept only here, because Spark never shows a partition.
 */
final class KeraInputPartition implements InputPartition {
    private static final long serialVersionUID = 1L;

    private final String piece;
    private final Token token;
    private final String[] hosts;

    /** {@code token} may be null. */
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
