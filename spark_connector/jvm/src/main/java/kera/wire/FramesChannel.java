package kera.wire;

import java.io.IOException;
import java.net.ProtocolException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Map;

/**
 * A range that is pulled from a broker over framed transport: copies of its chunks, a limited size at a time.
 *
 * <p>When an answer has been read, the next request is sent before its chunks are returned, so that the broker works
 * meanwhile. The frames are described in {@code docs/format.md}.
 */
final class FramesChannel implements Source {

    /** How long a broker holds a request while there are no new chunks. */
    private static final int WAIT_MS = 500;
    private final Piece piece;
    private final Link link;
    private final long until;
    private final int waitMs;
    private final ByteBuffer header = ByteBuffer.allocate(Frames.HEADER_BYTES).order(ByteOrder.LITTLE_ENDIAN);
    /** Start of the next request. */
    private Position next;
    private long requestId;
    private boolean asked;
    /** The time when the request was sent, or when the last byte of its answer arrived. */
    private long heard;
    private ByteBuffer head;
    private ByteBuffer bulk;
    private boolean closed;

    /** No more requests are sent after {@code until}, see {@link Source.Reason#AGAIN}. */
    FramesChannel(Piece piece, Broker broker, boolean local, Position start, long until) throws IOException {
        this.piece = piece;
        this.until = until;
        next = start;
        waitMs = piece.end == null ? WAIT_MS : 0;
        Piece.Settings settings = piece.settings;
        link = Frames.link(settings.transport(), settings.connectTimeoutMs(), broker, local, settings.access());
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
        ByteBuffer frame = ByteBuffer.allocate(Frames.HEADER_BYTES + message.length).order(ByteOrder.LITTLE_ENDIAN);
        requestId++;
        Frames.putRequest(frame, Frames.MULTI_READ_CHUNKS, requestId, message.length, 0);
        frame.put(message);
        asked = true;
        heard = System.nanoTime();
        header.clear();
        head = null;
        link.send(frame.flip());
    }

    /** Receive the rest of an answer; return whether it is complete. */
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
        Frames.require(header);
        int bulkBytes = header.getInt(Frames.BULK_BYTES_AT);
        head = ByteBuffer.allocate(header.getInt(Frames.HEAD_BYTES_AT));
        if (bulkBytes > 0) {
            if (bulk == null || bulk.capacity() < bulkBytes) {
                letGo();
                bulk = Buffers.take(bulkBytes);
            }
            bulk.clear();
        }
        if (bulk != null) {
            bulk.limit(bulkBytes);
        }
    }

    /** The event in an answer; null if the answer has no new chunks, but more may come. */
    private Event answered() throws IOException {
        asked = false;
        int kind = header.get(Frames.KIND_AT);
        long id = header.getLong(Frames.REQUEST_ID_AT);
        if (kind == Frames.ERROR) {
            Wire.Failure failure = Wire.failure(head.array());
            if (id != requestId) {
                throw new ProtocolException("refused by the peer: " + failure.message());
            }
            return new End(Reason.FAILED, next, failure);
        }
        if (kind != Frames.REPLY || id != requestId) {
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
            if (piece.end != null) { // the service decides whether this is a permitted loss
                String message = piece.end + " is beyond the end of streamlet " + piece.streamlet + " of stream '"
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

    /** Nothing to do: the next answer reuses the memory, and is only read by the next call of {@link #next(long)}. */
    @Override
    public void giveBack(Stretch stretch) {
    }

    @Override
    public void finish() {
        if (!closed && !asked) {
            closed = true;
            letGo();
            Frames.giveBack(link);
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
