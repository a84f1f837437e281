package kera.spark;

import java.io.IOException;
import java.io.InterruptedIOException;
import java.net.ProtocolException;
import java.nio.ByteBuffer;
import java.nio.channels.ClosedByInterruptException;
import java.util.ArrayList;
import java.util.List;
import java.util.zip.CRC32C;

/** The frames in which one talks with a broker, as {@code docs/format.md} has them; and connections for them. */
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

    private static final int CRC_AT = 28;
    private static final short MAGIC = 'K' | 'F' << 8;
    private static final int VERSION = 1;
    private static final int HEAD_BYTES_MAX = 4 << 20;
    private static final int BULK_BYTES_MAX = 64 << 20;

    private static final Pool<Link> IDLE = new Pool<>();

    private Frames() {
    }

    /** The header of a request, put where {@code frame}, which is little-endian, is. */
    static void putRequest(ByteBuffer frame, int method, long requestId, int headBytes, int bulkBytes) {
        int at = frame.position();
        frame.putShort(MAGIC).put((byte) VERSION).put((byte) REQUEST).putInt(method).putLong(requestId)
                .putInt(headBytes).putInt(bulkBytes).putInt(0);
        frame.putInt(checksum(frame, at));
    }

    /** Fails unless {@code header} is that of a frame which is not too large. */
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
     * A connection to a broker by the first of its addresses that can be reached, the fastest way first; one that is
     * idle, if there is one.
     */
    static Link link(String transport, long timeoutMs, Broker broker, boolean local, Tls tls) throws IOException {
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
                Tls secured = address.equals(path) ? null : tls;
                Link kept = IDLE.take(kind(address, secured));
                if (kept != null) {
                    return kept;
                }
                return address.equals(path) ? Link.unix(path, timeoutMs) : Link.tcp(address, timeoutMs, secured);
            } catch (InterruptedIOException | ClosedByInterruptException error) {
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

    /** Keep a connection on which nothing is under way for the next who wants one. */
    static void giveBack(Link link) {
        IDLE.give(kind(link.address(), link.tls()), link);
    }

    /** Who shows other certificates, or wants to see others, has connections of its own. */
    private static String kind(String address, Tls tls) {
        return tls == null ? address : address + " " + tls;
    }
}
