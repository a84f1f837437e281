package kera.wire;

import java.io.IOException;
import java.io.InterruptedIOException;
import java.net.ProtocolException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.ClosedByInterruptException;
import java.util.ArrayList;
import java.util.List;
import java.util.zip.CRC32C;

/** The frames of requests and replies, as described in {@code docs/format.md}, and connections for them. */
final class Frames {

    static final int HEADER_BYTES = 32;
    static final int KIND_AT = 3;
    static final int REQUEST_ID_AT = 8;
    static final int HEAD_BYTES_AT = 16;
    static final int BULK_BYTES_AT = 20;
    static final int REQUEST = 1;
    static final int REPLY = 2;
    static final int ERROR = 3;
    static final int MULTI_WRITE_CHUNKS = 1;
    static final int MULTI_READ_CHUNKS = 2;

    private static final int AUTHENTICATE = 501;
    private static final int CRC_AT = 28;
    private static final short MAGIC = 'K' | 'F' << 8;
    private static final int VERSION = 1;
    private static final int HEAD_BYTES_MAX = 4 << 20;
    private static final int BULK_BYTES_MAX = 64 << 20;

    private static final Pool<Link> IDLE = new Pool<>();

    private Frames() {
    }

    /** Put the header of a request at the position of {@code frame}, which is little-endian. */
    static void putRequest(ByteBuffer frame, int method, long requestId, int headBytes, int bulkBytes) {
        int at = frame.position();
        frame.putShort(MAGIC).put((byte) VERSION).put((byte) REQUEST).putInt(method).putLong(requestId)
                .putInt(headBytes).putInt(bulkBytes).putInt(0);
        frame.putInt(checksum(frame, at));
    }

    /** Fail unless {@code header} is the header of a frame that is not too large. */
    static void require(ByteBuffer header) throws ProtocolException {
        if (header.getShort(0) != MAGIC) {
            throw new ProtocolException("peer does not speak KerA frames (is this the gRPC port?)");
        }
        if (header.get(2) != VERSION) {
            throw new ProtocolException("peer speaks frames of version " + (header.get(2) & 0xFF)
                    + ", this program " + VERSION);
        }
        if (checksum(header, 0) != header.getInt(CRC_AT)) {
            throw new ProtocolException("frame header does not match its checksum");
        }
        long headBytes = Integer.toUnsignedLong(header.getInt(HEAD_BYTES_AT));
        long bulkBytes = Integer.toUnsignedLong(header.getInt(BULK_BYTES_AT));
        if (headBytes > HEAD_BYTES_MAX || bulkBytes > BULK_BYTES_MAX) {
            throw new ProtocolException("frame of " + headBytes + " + " + bulkBytes + " bytes is over the limits of "
                    + HEAD_BYTES_MAX + " + " + BULK_BYTES_MAX);
        }
    }

    private static int checksum(ByteBuffer frame, int at) {
        CRC32C crc = new CRC32C();
        crc.update(frame.duplicate().position(at).limit(at + CRC_AT));
        return (int) crc.getValue();
    }

    /**
     * A connection to the first reachable address of a broker, the fastest first; an idle connection if there is one.
     * Throws {@link Refused} if the broker does not accept the client's identity.
     */
    static Link link(String transport, long timeoutMs, Broker broker, boolean local, Access access)
            throws IOException {
        List<String> addresses = new ArrayList<>();
        String path = broker.framesUnixPath();
        if (allows(transport, "unix") && local && !path.isEmpty()) {
            addresses.add(path);
        }
        if (allows(transport, "tcp") && !broker.framesAddress().isEmpty()) {
            addresses.add(broker.framesAddress());
        }
        if (addresses.isEmpty()) {
            throw new KeraException("InvalidArgument", "broker " + broker.brokerId() + " does not offer transport '"
                    + transport + "' in a way that the columnar engine knows, which is frames over TCP or"
                    + " a unix socket of the same host; choose the engine python", false);
        }
        IOException failure = null;
        for (String address : addresses) {
            try {
                boolean unix = address.equals(path);
                Access shown = unix ? access.withinHost() : access;
                Link kept = IDLE.take(new Kind(address, shown));
                if (kept != null) {
                    return kept;
                }
                Link made = unix ? Link.unix(path, timeoutMs) : Link.tcp(address, timeoutMs, shown.tls());
                return introduced(made, shown, timeoutMs);
            } catch (InterruptedIOException | ClosedByInterruptException | Refused error) {
                throw error;
            } catch (IOException error) {
                failure = error;
            }
        }
        throw failure;
    }

    private static boolean allows(String transport, String wanted) {
        return transport.equals("auto") || transport.equals(wanted);
    }

    /** Authenticate {@code link}, and return it; close it if that fails. */
    private static Link introduced(Link link, Access access, long timeoutMs) throws IOException {
        boolean known = false;
        try {
            if (access.token() != null) {
                authenticate(link, access.token(), Deadline.afterMs(timeoutMs));
            }
            link.madeAs(access);
            known = true;
            return link;
        } finally {
            if (!known) {
                link.close();
            }
        }
    }

    private static void authenticate(Link link, Token token, long deadline) throws IOException {
        byte[] message = Wire.authenticateRequest(token.text());
        ByteBuffer frame = ByteBuffer.allocate(HEADER_BYTES + message.length).order(ByteOrder.LITTLE_ENDIAN);
        putRequest(frame, AUTHENTICATE, 1, message.length, 0);
        link.send(frame.put(message).flip());
        ByteBuffer header = received(link, HEADER_BYTES, deadline);
        require(header);
        if (header.getInt(BULK_BYTES_AT) != 0) {
            throw new ProtocolException("an answer to Authenticate has chunks");
        }
        ByteBuffer answer = received(link, header.getInt(HEAD_BYTES_AT), deadline);
        switch (header.get(KIND_AT)) {
            case REPLY -> { } // its content is not needed here
            case ERROR -> throw new Refused(Wire.failure(answer.array()));
            default -> throw new ProtocolException("peer sent a frame of kind " + header.get(KIND_AT)
                    + " and no reply");
        }
    }

    private static ByteBuffer received(Link link, int bytes, long deadline) throws IOException {
        ByteBuffer part = ByteBuffer.allocate(bytes).order(ByteOrder.LITTLE_ENDIAN);
        while (part.hasRemaining()) {
            if (link.receive(part, deadline) == 0) {
                throw new IOException("no answer from " + link.address() + " to Authenticate in time");
            }
        }
        return part;
    }

    /** Return a connection with no request in flight to the pool. */
    static void giveBack(Link link) {
        IDLE.give(new Kind(link.address(), link.access()), link);
    }

    /** The key of the pool: different credentials, or different trusted authorities, use different connections. */
    private record Kind(String address, Access access) {
    }
}
