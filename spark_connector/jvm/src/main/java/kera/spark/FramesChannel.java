package kera.spark;

import java.io.IOException;
import java.io.InterruptedIOException;
import java.net.ProtocolException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.ClosedByInterruptException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.zip.CRC32C;

/**
 * A range that is pulled from a broker over framed transport: copies of its chunks, so many bytes at a time.
 *
 * <p>The next request is sent when an answer has been read, before its chunks are given out: the broker works on it
 * meanwhile. The frames are described in {@code docs/format.md}.
 */
final class FramesChannel implements Source {

    /** How long a broker holds a request for what may still come. */
    private static final int WAIT_MS = 500;
    private static final int HEADER_BYTES = 32;
    private static final int CRC_AT = 28;
    private static final short MAGIC = 'K' | 'F' << 8;
    private static final int VERSION = 1;
    private static final int REQUEST = 1;
    private static final int REPLY = 2;
    private static final int ERROR = 3;
    private static final int MULTI_READ_CHUNKS = 2;
    private static final int HEAD_BYTES_MAX = 4 << 20;
    private static final int BULK_BYTES_MAX = 64 << 20;

    private static final Pool<Link> IDLE = new Pool<>();

    private final Piece piece;
    private final Link link;
    private final long until;
    private final int waitMs;
    private final ByteBuffer header = ByteBuffer.allocate(HEADER_BYTES).order(ByteOrder.LITTLE_ENDIAN);
    /** Where the next request starts. */
    private Position next;
    private long requestId;
    private boolean asked;
    /** When the request was sent, or the last byte of its answer came. */
    private long heard;
    private ByteBuffer head;
    private ByteBuffer bulk;
    private boolean closed;

    /** {@code until}: the time from which on no more is asked for this way, see {@link Source.Reason#AGAIN}. */
    FramesChannel(Piece piece, Broker broker, boolean local, Position start, long until) throws IOException {
        this.piece = piece;
        this.until = until;
        next = start;
        waitMs = piece.end == null ? WAIT_MS : 0;
        link = link(piece.settings, broker, local);
    }

    /** To the first address that can be reached, the fastest way first. */
    private static Link link(Piece.Settings settings, Broker broker, boolean local) throws IOException {
        List<String> addresses = new ArrayList<>();
        String path = broker.framesUnixPath();
        if (allows(settings, "unix") && local && !path.isEmpty()) {
            addresses.add(path);
        }
        if (allows(settings, "tcp") && !broker.framesAddress().isEmpty()) {
            addresses.add(broker.framesAddress());
        }
        if (addresses.isEmpty()) {
            throw new KeraException("InvalidArgument", "broker " + broker.brokerId() + " does not offer transport '"
                    + settings.transport() + "' in a way that the columnar engine knows, which is frames over TCP or"
                    + " a unix socket of the same host; choose the engine python", false);
        }
        IOException failure = null;
        for (String address : addresses) {
            try {
                Link kept = IDLE.take(address);
                if (kept != null) {
                    return kept;
                }
                return address.equals(path) ? Link.unix(path, settings.connectTimeoutMs())
                        : Link.tcp(address, settings.connectTimeoutMs());
            } catch (InterruptedIOException | ClosedByInterruptException error) {
                throw error;
            } catch (IOException error) {
                failure = error;
            }
        }
        throw failure;
    }

    private static boolean allows(Piece.Settings settings, String transport) {
        return settings.transport().equals("auto") || settings.transport().equals(transport);
    }

    @Override
    public Event next(long deadline) throws IOException {
        while (true) {
            if (!asked) {
                if (reached()) {
                    return new End(Reason.REACHED, next, null);
                }
                if (Deadline.passed(until)) {
                    return new End(Reason.AGAIN, next, null);
                }
                ask();
            }
            if (!received(deadline)) {
                return null;
            }
            Event event = answered();
            if (event != null) {
                return event;
            }
        }
    }

    private boolean reached() {
        return piece.end != null && !next.isBefore(piece.end);
    }

    private void ask() throws IOException {
        byte[] message = Wire.readRequest(piece, next, waitMs);
        ByteBuffer frame = ByteBuffer.allocate(HEADER_BYTES + message.length).order(ByteOrder.LITTLE_ENDIAN);
        requestId++;
        frame.putShort(MAGIC).put((byte) VERSION).put((byte) REQUEST).putInt(MULTI_READ_CHUNKS).putLong(requestId)
                .putInt(message.length).putInt(0).putInt(0);
        frame.putInt(checksum(frame)).put(message);
        asked = true;
        heard = System.nanoTime();
        header.clear();
        head = null;
        link.send(frame.flip());
    }

    private static int checksum(ByteBuffer frame) {
        CRC32C crc = new CRC32C();
        crc.update(frame.array(), 0, CRC_AT);
        return (int) crc.getValue();
    }

    /** Receive what is missing of an answer; whether it is whole. */
    private boolean received(long deadline) throws IOException {
        if (!filled(header, deadline)) {
            return false;
        }
        if (head == null) {
            beginBody();
        }
        return filled(head, deadline) && (bulk == null || filled(bulk, deadline));
    }

    private boolean filled(ByteBuffer part, long deadline) throws IOException {
        while (part.hasRemaining()) {
            long patience = heard + Deadline.nanos(piece.settings.requestTimeoutMs() + waitMs);
            if (link.receive(part, Deadline.earlier(deadline, patience)) > 0) {
                heard = System.nanoTime();
            } else if (Deadline.passed(patience)) {
                throw new IOException("no answer from " + link.address() + " to MultiReadChunks within "
                        + piece.settings.requestTimeoutMs() / 1000.0 + " s");
            } else {
                return false;
            }
        }
        return true;
    }

    private void beginBody() throws ProtocolException {
        if (header.getShort(0) != MAGIC) {
            throw new ProtocolException("peer does not speak KerA frames (is this the gRPC port?)");
        }
        if (header.get(2) != VERSION) {
            throw new ProtocolException("peer speaks frames of version " + (header.get(2) & 0xFF)
                    + ", this program " + VERSION);
        }
        if (checksum(header) != header.getInt(CRC_AT)) {
            throw new ProtocolException("frame header does not match its checksum");
        }
        long headBytes = Integer.toUnsignedLong(header.getInt(16));
        long bulkBytes = Integer.toUnsignedLong(header.getInt(20));
        if (headBytes > HEAD_BYTES_MAX || bulkBytes > BULK_BYTES_MAX) {
            throw new ProtocolException("frame of " + headBytes + " + " + bulkBytes + " bytes is over the limits of "
                    + HEAD_BYTES_MAX + " + " + BULK_BYTES_MAX);
        }
        head = ByteBuffer.allocate((int) headBytes);
        if (bulkBytes > 0) {
            if (bulk == null || bulk.capacity() < bulkBytes) {
                letGo();
                bulk = Buffers.take((int) bulkBytes);
            }
            bulk.clear();
        }
        if (bulk != null) {
            bulk.limit((int) bulkBytes);
        }
    }

    /** What an answer says; null: nothing has come, and something may yet. */
    private Event answered() throws IOException {
        asked = false;
        int kind = header.get(3);
        long id = header.getLong(8);
        if (kind == ERROR) {
            Wire.Failure failure = Wire.failure(head.array());
            if (id != requestId) {
                throw new ProtocolException("refused by the peer: " + failure.message());
            }
            return new End(Reason.FAILED, next, failure);
        }
        if (kind != REPLY || id != requestId) {
            throw new ProtocolException("peer sent a frame of kind " + kind + " and no reply");
        }
        Wire.ReadResponse response = Wire.readResponse(head.array());
        if (response.error() != null) {
            return new End(Reason.FAILED, next, response.error());
        }
        int bytes = bulk == null ? 0 : bulk.limit();
        if (response.lengthBytes() != bytes || response.next().isBefore(next)
                || (bytes > 0 && response.next().equals(next))) {
            throw new ProtocolException("an answer has " + bytes + " bytes, and says that " + response.lengthBytes()
                    + " of them lie between " + next + " and " + response.next());
        }
        if (response.next().equals(next)) {
            if (piece.end != null) { // a loss, where that may be: the service decides
                String message = piece.end + " lies behind the end of streamlet " + piece.streamlet + " of stream '"
                        + piece.stream + "'";
                return new End(Reason.FAILED, next, new Wire.Failure("invalid_argument", message, false, Map.of()));
            }
            return null;
        }
        ByteBuffer content = bulk == null ? ByteBuffer.allocateDirect(0) : bulk.slice(0, bytes);
        Stretch stretch =
                new Stretch(content.order(ByteOrder.LITTLE_ENDIAN), next, response.next(), null, 0, 0);
        next = response.next();
        if (!reached() && !Deadline.passed(until)) {
            ask();
        }
        return stretch;
    }

    /** Its memory is used for the next answer, which is only read when that is asked for. */
    @Override
    public void giveBack(Stretch stretch) {
    }

    @Override
    public void finish() {
        if (!closed && !asked) {
            closed = true;
            letGo();
            IDLE.give(link.address(), link);
        }
        close();
    }

    @Override
    public void close() {
        if (!closed) {
            closed = true;
            letGo();
            link.close();
        }
    }

    private void letGo() {
        if (bulk != null) {
            Buffers.give(bulk);
            bulk = null;
        }
    }
}
