package kera.wire;

/**
 * How a connection is secured, and who it is for.
 *
 * @param tls null: over the network it is not encrypted
 * @param token null: nothing is shown but what {@code tls} has
 */
record Access(Tls tls, Token token) {
    static final Access OPEN = new Access(null, null);

    /** The same over a unix socket, which stays within the host. */
    Access withinHost() {
        return new Access(null, token);
    }
}
