package kera.wire;

import java.io.Closeable;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.ClosedByInterruptException;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.function.LongConsumer;
import java.util.function.Supplier;
import java.util.zip.CRC32C;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;

/**
 * Appends the rows of outlets, one chunk per outlet at a time, at the brokers that own their streamlets:
 * compare-and-append, as in {@code client/producing/appender.py}. The sender reports failures to the service, which
 * waits, and then names the broker to send the chunk to again, or raises the error that ends the task.
 *
 * <p>Belongs to one thread at a time, and has no thread of its own: it reads answers only in {@link #start},
 * {@link #look} and {@link #await}.
 */
public final class ChunkSender implements Closeable {

    private static final int CHUNK_HEADER_BYTES = 128;
    private static final int HEADER_CRC_AT = 84;
    private static final int PLACEMENT_BYTES = 40;
    private static final int ALIGNMENT_BYTES = 64;
    private static final byte[] MAGIC = {'K', 'E', 'R', 'A'};
    private static final byte LEAN_VERSION = 2;
    private static final byte COMPRESSED = 1;
    private static final int PAYLOAD_AT = Frames.HEADER_BYTES + Wire.ONE_CHUNK.length + CHUNK_HEADER_BYTES;
    /** Limits of the chunks in flight, in number and in bytes; one chunk is always allowed. */
    private static final int UNDER_WAY_MAX = 64;
    private static final long UNDER_WAY_BYTES_MAX = 16 << 20;
    /** The maximum of a single wait: between waits a task checks whether Spark has cancelled it. */
    private static final long LOOK_MS = 500;
    /** A task that spends longer than this between two calls may also stay away for very long. */
    private static final long SLOW_NANOS = Deadline.nanos(100);

    private final WriteTarget target;
    private final long producerId;
    private final int producerEpoch;
    private final Supplier<? extends Planner> service;
    private final LongConsumer stored;
    private final String writer = UUID.randomUUID().toString();
    private final LeanEncoder encoder = new LeanEncoder();
    private final Map<Integer, WriteConnection> connections = new LinkedHashMap<>();
    private List<Broken> broken = new ArrayList<>();
    /** Outlets with waiting rows and no chunk in flight. */
    private final Deque<Outlet> ready = new ArrayDeque<>();
    private int underWay;
    private long underWayBytes;
    /** The time when the task last went on with its rows. */
    private long wentOn = System.nanoTime();

    /** A chunk that was not acknowledged, and why. */
    private record Broken(Outlet outlet, Wire.Failure failure) {
    }

    /** {@code stored} gets the nanoseconds between sending a chunk and its acknowledgement. */
    public ChunkSender(WriteTarget target, long producerId, int producerEpoch, Supplier<? extends Planner> service,
            LongConsumer stored) {
        this.target = target;
        this.producerId = producerId;
        this.producerEpoch = producerEpoch;
        this.service = service;
        this.stored = stored;
    }

    /** Send the waiting rows of {@code outlet}, unless they are being sent already. */
    public void start(Outlet outlet) throws IOException {
        if (outlet.idle()) {
            ready.addLast(outlet);
            outlet.begun = true;
            settle();
            goOn();
        }
    }

    /** Take the answers that have arrived, and send the chunks that may now be sent. */
    public void look() throws IOException {
        for (int brokerId : new ArrayList<>(connections.keySet())) {
            look(brokerId, Deadline.afterMs(0));
        }
        settle();
        goOn();
    }

    /**
     * A fast task calls again soon, and then sends the unsent bytes. A task that was away for long may stay away again,
     * for longer than a broker waits for the rest of a chunk. So such a task waits here until all is sent.
     */
    private void goOn() throws IOException {
        boolean slow = System.nanoTime() - wentOn > SLOW_NANOS;
        while (slow && !drained()) {
            settle();
        }
        wentOn = System.nanoTime();
    }

    private boolean drained() throws IOException {
        for (int brokerId : new ArrayList<>(connections.keySet())) {
            try {
                connections.get(brokerId).drain();
            } catch (InterruptedIOException | ClosedByInterruptException error) {
                throw error;
            } catch (IOException error) {
                lost(brokerId, error);
            }
        }
        return broken.isEmpty();
    }

    /** Wait for an answer, or for {@link #LOOK_MS}. */
    public void await() throws IOException {
        int first = 0;
        WriteConnection oldest = null;
        for (Map.Entry<Integer, WriteConnection> each : connections.entrySet()) {
            WriteConnection other = each.getValue();
            if (other.waits() && (oldest == null || other.deadline() - oldest.deadline() < 0)) {
                first = each.getKey();
                oldest = other;
            }
        }
        if (oldest == null) {
            throw new IllegalStateException("nothing is under way");
        }
        look(first, Deadline.earlier(oldest.deadline(), Deadline.afterMs(LOOK_MS)));
        look();
    }

    /** Take answers of a broker; wait for the first one until {@code until}. */
    private void look(int brokerId, long until) throws IOException {
        WriteConnection connection = connections.get(brokerId);
        if (connection == null || !connection.waits()) {
            return;
        }
        try {
            WriteConnection.Answer answer = connection.receive(until);
            while (answer != null) {
                take(answer);
                answer = connection.waits() ? connection.receive(Deadline.afterMs(0)) : null;
            }
            if (connection.waits() && Deadline.passed(connection.deadline())) {
                throw new IOException("no answer from " + connection.address() + " to MultiWriteChunks within "
                        + connection.timeoutSeconds() + " s");
            }
        } catch (InterruptedIOException | ClosedByInterruptException error) {
            throw error;
        } catch (IOException error) {
            lost(brokerId, error);
        }
    }

    private void lost(int brokerId, IOException error) {
        WriteConnection connection = connections.remove(brokerId);
        if (connection == null) {
            return; // the loss has been handled
        }
        Wire.Failure failure = new Wire.Failure("uncertain", error.getMessage(), true, Map.of());
        connection.abandon().forEach(outlet -> broken.add(new Broken(outlet, failure)));
    }

    private void take(WriteConnection.Answer answer) {
        Outlet outlet = answer.outlet();
        Wire.ChunkStatus status = answer.status();
        if (status.error() != null) {
            broken.add(new Broken(outlet, status.error()));
            return;
        }
        if (status.duplicate()) {
            found(outlet, status);
        } else {
            outlet.stored(false);
        }
        outlet.progressed = true;
        stored.accept(System.nanoTime() - outlet.sent);
        underWay--;
        underWayBytes -= outlet.frame.limit();
        Buffers.give(outlet.frame);
        outlet.frame = null;
        outlet.begun = outlet.first() != null;
        if (outlet.begun) {
            ready.addLast(outlet);
        }
    }

    /** Handle a duplicate: an earlier attempt stored the chunk, or this one did and the answer was lost. */
    private void found(Outlet outlet, Wire.ChunkStatus status) {
        ObjectNode params = about(Planner.JSON.createObjectNode()).put("streamlet", outlet.streamlet)
                .put("entry", status.entry()).put("producer_id", producerId)
                .put("producer_epoch", Integer.toUnsignedLong(producerEpoch)).put("sequence", outlet.sequence())
                .put("timed", outlet.first().timed());
        params.set("position", status.position() == null ? null : status.position().toJson());
        params.set("after", outlet.found == null ? null : outlet.found.toJson());
        JsonNode answer = service.get().call("stored_rows", params);
        if (answer.get("rows").isNull()) { // retention has deleted the chunk, so its rows are not known any more
            outlet.stored(true);
        } else {
            outlet.found = Position.parse(answer.get("end"));
            outlet.stored(Rows.parse(answer.get("rows")));
        }
    }

    private ObjectNode about(ObjectNode params) {
        params.set("connection", target.connection());
        Token token = target.access().token();
        return params.put("token", token == null ? null : token.text()).put("stream", target.stream())
                .put("stream_id", target.streamId());
    }

    // -- sending ---------------------------------------------------------------------------------------------------

    /** Send the chunks that may be sent, and all failed ones again. */
    private void settle() throws IOException {
        while (!broken.isEmpty() || mayBegin()) {
            while (mayBegin()) {
                Outlet outlet = ready.removeFirst();
                outlet.frame = encoded(outlet);
                underWay++;
                underWayBytes += outlet.frame.limit();
                send(outlet);
            }
            List<Broken> failed = broken;
            broken = new ArrayList<>();
            if (!failed.isEmpty()) {
                route(failed);
            }
            for (Broken each : failed) {
                send(each.outlet);
            }
        }
    }

    private boolean mayBegin() {
        boolean room = underWay < UNDER_WAY_MAX && underWayBytes < UNDER_WAY_BYTES_MAX;
        return !ready.isEmpty() && (room || underWay == 0);
    }

    /** Send the chunk of {@code outlet} to the owner of the streamlet. */
    private void send(Outlet outlet) throws IOException {
        Broker broker = target.owner(outlet.streamlet);
        WriteConnection connection = connections.get(broker.brokerId());
        try {
            if (connection == null) {
                connection = new WriteConnection(target, broker);
                connections.put(broker.brokerId(), connection);
            }
        } catch (InterruptedIOException | ClosedByInterruptException error) {
            throw error;
        } catch (IOException error) {
            broken.add(new Broken(outlet, Refused.failureOf(error)));
            return;
        }
        try {
            connection.send(outlet);
        } catch (InterruptedIOException | ClosedByInterruptException error) {
            throw error;
        } catch (IOException error) {
            lost(broker.brokerId(), error);
        }
    }

    private void route(List<Broken> failed) {
        ObjectNode params = about(Planner.JSON.createObjectNode()).put("writer", writer);
        ArrayNode each = params.putArray("failed");
        for (Broken one : failed) {
            ObjectNode about = each.addObject().put("streamlet", one.outlet.streamlet)
                    .put("progressed", one.outlet.progressed);
            about.putObject("error").put("code", one.failure.code()).put("message", one.failure.message())
                    .set("attributes", Planner.JSON.valueToTree(one.failure.attributes()));
            one.outlet.progressed = false;
        }
        JsonNode answer = service.get().call("route_write", params);
        target.learn(answer);
        for (int index = 0; index < failed.size(); index++) {
            target.owners()[failed.get(index).outlet.streamlet] = answer.get("owners").get(index).asInt();
        }
    }

    // -- chunks ----------------------------------------------------------------------------------------------------

    /** The frame with the next chunk of {@code outlet}; each send writes its own frame header into it. */
    private ByteBuffer encoded(Outlet outlet) {
        Rows rows = outlet.first();
        long nowUs = System.currentTimeMillis() * 1000;
        long room = PAYLOAD_AT + LeanEncoder.bound(rows.bytes(), target.codec()) + ALIGNMENT_BYTES;
        ByteBuffer frame = Buffers.take(Math.toIntExact(room)).order(ByteOrder.LITTLE_ENDIAN);
        encoder.encode(rows, nowUs, target.codec(), frame.position(PAYLOAD_AT));
        int payloadBytes = frame.position() - PAYLOAD_AT;
        while ((frame.position() - PAYLOAD_AT) % ALIGNMENT_BYTES != 0) {
            frame.put((byte) 0);
        }
        frame.flip();
        int chunkBytes = frame.limit() - PAYLOAD_AT + CHUNK_HEADER_BYTES;
        if (chunkBytes > target.chunkBytesMax()) {
            Buffers.give(frame);
            throw new KeraException("RecordTooLarge",
                    "record of " + chunkBytes + " bytes does not fit into " + target.room(), false);
        }
        int headerAt = PAYLOAD_AT - CHUNK_HEADER_BYTES;
        frame.position(headerAt - Wire.ONE_CHUNK.length).put(Wire.ONE_CHUNK);
        byte flags = target.codec() == Compression.NONE ? 0 : COMPRESSED;
        frame.put(MAGIC).put(LEAN_VERSION).put(flags).putShort((short) CHUNK_HEADER_BYTES).putInt(payloadBytes)
                .putInt(rows.count()).putLong(target.streamId()).putInt(outlet.streamlet).putInt(target.schemaId())
                .putLong(producerId).putInt(producerEpoch).putInt(target.codec()).putLong(outlet.sequence())
                .putLong(nowUs).putLong(encoder.timeMin()).putLong(encoder.timeMax())
                .putInt(checksum(frame, PAYLOAD_AT, frame.limit()));
        frame.putInt(checksum(frame, headerAt, headerAt + HEADER_CRC_AT)).put(new byte[PLACEMENT_BYTES]);
        return frame;
    }

    private static int checksum(ByteBuffer of, int from, int to) {
        CRC32C crc = new CRC32C();
        crc.update(of.duplicate().limit(to).position(from));
        return (int) crc.getValue();
    }

    /** Send nothing more, and close the connections or return them to the pool. */
    @Override
    public void close() {
        connections.values().forEach(WriteConnection::finish);
        connections.clear();
    }
}
