package kera.wire;

/**
 * How a connection is secured, and for whom.
 *
 * @param tls the client's certificates; null if network connections are not encrypted
 * @param token the token to authenticate with; null if there is only the certificate of {@code tls}, if any
 */
record Access(Tls tls, Token token) {
    static final Access OPEN = new Access(null, null);

    /** The same access over a unix socket, which stays within the host and needs no encryption. */
    Access withinHost() {
        return new Access(null, token);
    }
}
