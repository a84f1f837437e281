package kera.wire;

import java.io.IOException;
import java.net.ProtocolException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** A connection to a broker that sends chunks, at most one per streamlet at a time; answers come in any order. */
final class WriteConnection {

    private final Link link;
    private final long timeoutMs;
    private final ByteBuffer header = ByteBuffer.allocate(Frames.HEADER_BYTES).order(ByteOrder.LITTLE_ENDIAN);
    private ByteBuffer head;
    private long requestId;
    /** The outlets with a chunk in flight, by request id, in the order of sending. */
    private final Map<Long, Outlet> asked = new LinkedHashMap<>();

    /** The outcome of a chunk. */
    record Answer(Outlet outlet, Wire.ChunkStatus status) {
    }

    WriteConnection(WriteTarget target, Broker broker) throws IOException {
        timeoutMs = target.requestTimeoutMs();
        link = Frames.link(target.transport(), target.connectTimeoutMs(), broker, broker.isOnThisNode(),
                target.access());
    }

    /** Send the chunk of {@code outlet}, whose frame is complete except for its header. */
    void send(Outlet outlet) throws IOException {
        ByteBuffer frame = outlet.frame.duplicate().order(ByteOrder.LITTLE_ENDIAN);
        int headBytes = Wire.ONE_CHUNK.length;
        requestId++;
        Frames.putRequest(frame.position(0), Frames.MULTI_WRITE_CHUNKS, requestId, headBytes,
                frame.limit() - Frames.HEADER_BYTES - headBytes);
        outlet.sent = System.nanoTime();
        asked.put(requestId, outlet);
        link.send(frame.position(0));
    }

    /** Wait until all chunks are sent. */
    void drain() throws IOException {
        if (waits() && !link.sent(deadline())) {
            throw new IOException(link.address() + " does not take what it is sent within " + timeoutSeconds() + " s");
        }
    }

    /** Whether answers are outstanding. */
    boolean waits() {
        return !asked.isEmpty();
    }

    /** The deadline of the oldest outstanding answer. */
    long deadline() {
        return asked.values().iterator().next().sent + Deadline.nanos(timeoutMs);
    }

    /** The next answer; null if none arrives by {@code deadline}. */
    Answer receive(long deadline) throws IOException {
        if (!filled(header, deadline)) {
            return null;
        }
        if (head == null) {
            Frames.require(header);
            if (header.getInt(Frames.BULK_BYTES_AT) != 0) {
                throw new ProtocolException("an answer to MultiWriteChunks has chunks");
            }
            head = ByteBuffer.allocate(header.getInt(Frames.HEAD_BYTES_AT));
        }
        if (!filled(head, deadline)) {
            return null;
        }
        byte[] message = head.array();
        head = null;
        header.clear();
        int kind = header.get(Frames.KIND_AT);
        long id = header.getLong(Frames.REQUEST_ID_AT);
        Outlet outlet = asked.get(id); // it stays there until the fate of its chunk is known, for `abandon`
        if (kind == Frames.ERROR) {
            Wire.Failure failure = Wire.failure(message);
            if (outlet == null) {
                throw new ProtocolException("refused by the peer: " + failure.message());
            }
            asked.remove(id);
            return new Answer(outlet, new Wire.ChunkStatus(failure, 0, null, false));
        }
        if (kind != Frames.REPLY || outlet == null) {
            throw new ProtocolException("peer sent a frame of kind " + kind + " and no reply");
        }
        Wire.ChunkStatus status = Wire.writeResponse(message);
        asked.remove(id);
        return new Answer(outlet, status);
    }

    private boolean filled(ByteBuffer part, long deadline) throws IOException {
        while (part.hasRemaining()) {
            if (link.receive(part, deadline) == 0) {
                return false;
            }
        }
        return true;
    }

    /** Close the connection; return the outlets whose answers have not arrived. */
    List<Outlet> abandon() {
        link.close();
        List<Outlet> outlets = new ArrayList<>(asked.values());
        asked.clear();
        return outlets;
    }

    /** Close the connection, or, if all requests are answered, keep it for others. */
    void finish() {
        if (asked.isEmpty() && head == null && header.position() == 0) {
            Frames.giveBack(link);
        } else {
            link.close();
        }
    }

    String address() {
        return link.address();
    }

    double timeoutSeconds() {
        return timeoutMs / 1000.0;
    }
}
