package kera.wire;

import java.io.Closeable;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.io.UncheckedIOException;
import java.net.ProtocolException;
import java.nio.channels.ClosedByInterruptException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Supplier;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Reads the chunks of a piece in order, wherever they are: each exactly once, whatever way they come.
 *
 * <p>A broker on this host pushes chunks: they are read in place, in its memory. From other brokers they are pulled.
 * The reader reports failures to the service, which waits, and then says where to go on, or raises an error. Belongs to
 * one thread. If this thread is interrupted, the reader throws an {@link InterruptedIOException}, a
 * {@link ClosedByInterruptException} or, while it asks the service, an InterruptedException.
 */
public final class PieceReader implements Closeable {

    /** How long chunks are pulled after a broker could not push; a piece with an end is pulled up to its end. */
    private static final long PUSH_AGAIN_MS = 1_000;
    private static final Logger LOG = LoggerFactory.getLogger(PieceReader.class);
    /** Push sockets that could not be used and for which this has been logged. */
    private static final Set<String> TOLD = ConcurrentHashMap.newKeySet();

    /**
     * Counters of what a reader has done so far.
     *
     * @param bytesInPlace size of the chunks that were read in place, in a broker's memory
     * @param bytesPulled size of the chunks that came as copies
     * @param routes how often the planner was asked where to go on
     */
    public record Counters(long chunks, long bytesInPlace, long bytesPulled, long routes) {
    }

    private final Piece piece;
    private final Supplier<? extends Planner> service;
    private final boolean verifyPayload;
    private final String reader = UUID.randomUUID().toString();
    private final List<String> losses = new ArrayList<>();

    /** The place of the next chunk, or the end of the last one returned. */
    private Position next;
    /** The broker to read from; null if the service has to be asked. */
    private Broker broker;
    private Source source;
    private Stretch stretch;
    /** Offset of the next chunk in the stretch. */
    private int at;
    private long chunks;
    private long bytesInPlace;
    private long bytesPulled;
    private long routes;
    private boolean done;
    private boolean closed;
    private long pullUntil = Deadline.afterMs(0);
    /** Whether anything has arrived since the service was last asked. */
    private boolean progressed;
    /** The failure to report to the service, and the broker that it is about. */
    private Wire.Failure failure;
    private int failedBrokerId;

    /** If {@code payloadWanted} is false, payloads are not read, so their checksums are not verified either. */
    public PieceReader(Piece piece, Supplier<? extends Planner> service, boolean payloadWanted) {
        this.piece = piece;
        this.service = service;
        verifyPayload = payloadWanted && piece.settings.verifyChecksums();
        next = piece.start;
        broker = piece.broker;
        done = atEnd();
    }

    /** The next chunk, or null at the end of the piece; gives the chunk before back. */
    public Chunk next() throws IOException {
        return next(Deadline.never());
    }

    /**
     * The next chunk, or null if none arrives in time or the piece has {@link #ended}; gives the chunk before back.
     * This may take longer if the service has to be asked for a broker.
     */
    public Chunk nextWithin(long timeoutMs) throws IOException {
        return next(Deadline.afterMs(timeoutMs));
    }

    /**
     * The chunk after {@code last}, the last one returned, if it is already here and both are small; else null.
     * {@code last} stays valid. The caller must check that the chunk is {@link Chunk#intact}, as for the others.
     */
    public Chunk following(Chunk last) {
        if (stretch == null || at == stretch.bytes().limit() || atEnd() || !last.isFollowedBySmall(at)) {
            return null;
        }
        try {
            return inStretch();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    /** Whether the piece has no more chunks. */
    boolean ended() {
        return done && stretch == null;
    }

    /** Descriptions of the lost parts of the piece, if losses are not an error. */
    public List<String> losses() {
        return List.copyOf(losses);
    }

    public Counters counters() {
        return new Counters(chunks, bytesInPlace, bytesPulled, routes);
    }

    @Override
    public void close() {
        if (closed) {
            return;
        }
        closed = true;
        done = true;
        if (stretch != null) {
            source.giveBack(stretch);
            stretch = null;
        }
        finish();
    }

    private Chunk next(long deadline) throws IOException {
        while (true) {
            try {
                if (stretch != null) {
                    Chunk chunk = inStretch();
                    if (chunk != null) {
                        return chunk;
                    }
                    continue;
                }
                if (done) {
                    finish();
                    return null;
                }
                if (source == null) {
                    connect();
                    continue;
                }
                Source.Event event = source.next(deadline);
                if (event == null) {
                    return null;
                }
                take(event);
            } catch (InterruptedIOException | ClosedByInterruptException error) {
                throw error;
            } catch (IOException error) {
                failed(error);
            }
        }
    }

    // -- chunks ----------------------------------------------------------------------------------------------------

    /** The next chunk of the stretch; null if it has ended, was overwritten, or the next chunk has no records. */
    private Chunk inStretch() throws IOException {
        Position here = at == 0 ? stretch.start() : next;
        if (at == stretch.bytes().limit() || (at > 0 && atEnd())) {
            next = later(next, stretch.next());
            source.giveBack(stretch);
            stretch = null;
            return null;
        }
        Chunk chunk;
        try {
            chunk = Chunk.open(stretch, at, here, piece, verifyPayload);
        } catch (KeraException error) {
            if (stretch.intact()) {
                throw error;
            }
            chunk = null;
        }
        if (chunk == null || !chunk.intact()) { // checked after reading the bytes: they may have been overwritten
            overwritten();
            return null;
        }
        if (chunk.start.isBefore(next)) {
            throw new ProtocolException("a chunk at " + chunk.start + " came after " + next);
        }
        if (piece.end != null && !chunk.start.isBefore(piece.end)) {
            next = piece.end;
            at = stretch.bytes().limit();
            return null;
        }
        at += chunk.chunkBytes();
        next = chunk.next;
        if (chunk.punctuation) {
            return null;
        }
        chunks++;
        if (chunk.inPlace) {
            bytesInPlace += chunk.chunkBytes();
        } else {
            bytesPulled += chunk.chunkBytes();
        }
        return chunk;
    }

    /** Continue with `chunk`, the last one returned, once more: the broker's memory no longer has it. */
    public void again(Chunk chunk) {
        next = chunk.start;
        done = false;
        overwritten();
    }

    private void overwritten() {
        LOG.info("chunks that broker {} had pushed are no longer in its memory; reading them again",
                broker == null ? "(gone)" : broker.brokerId());
        stretch = null;
        drop();
        pull();
    }

    private boolean atEnd() {
        return piece.end != null && !next.isBefore(piece.end);
    }

    private static Position later(Position one, Position other) {
        return one.isBefore(other) ? other : one;
    }

    // -- where they come from --------------------------------------------------------------------------------------

    private void take(Source.Event event) {
        if (event instanceof Stretch came) {
            progressed = true;
            stretch = came;
            at = 0;
            return;
        }
        Source.End end = (Source.End) event;
        progressed |= next.isBefore(end.next());
        next = later(next, end.next());
        switch (end.reason()) {
            case REACHED -> done = true;
            case MOVED -> {
                finish();
                broker = null;
                done = atEnd();
            }
            case FAILED -> {
                if (source instanceof PushChannel && end.error().code().equals("invalid_cursor")) {
                    finish();
                    pull(); // if something is wrong with the cursor, pulling says what
                } else {
                    failed(end.error());
                }
            }
            case PULL -> {
                finish();
                pull();
            }
            case AGAIN -> finish();
        }
    }

    private void connect() throws IOException {
        if (broker == null) {
            route();
            return;
        }
        boolean local = broker.isOnThisNode();
        if (canPush(local)) {
            try {
                source = new PushChannel(piece, broker, next);
                return;
            } catch (InterruptedIOException | ClosedByInterruptException error) {
                throw error;
            } catch (ProtocolException error) {
                cannotPush(new KeraException("ProtocolError", error.getMessage(), false));
            } catch (KeraException error) {
                cannotPush(error);
            } catch (IOException error) {
                if (insists()) {
                    throw error;
                }
                cannotPush(error);
            }
        }
        boolean forNow = piece.end == null && !Deadline.passed(pullUntil);
        source = new FramesChannel(piece, broker, local, next, forNow ? pullUntil : Deadline.never());
    }

    private boolean insists() {
        return piece.sharedMemory.equals("always");
    }

    /** Whether the broker can push. Throws {@link KeraException} if the settings require pushing and it cannot. */
    private boolean canPush(boolean local) {
        if (piece.sharedMemory.equals("never") || !Deadline.passed(pullUntil)) {
            return false;
        }
        String transport = piece.settings.transport();
        String obstacle = null;
        if (!transport.equals("auto") && !transport.equals("unix")) {
            obstacle = "brokers are to be reached by " + transport;
        } else if (!local) {
            obstacle = "broker " + broker.brokerId() + " is on another node, " + broker.nodeId();
        } else if (broker.pushUnixPath().isEmpty()) {
            obstacle = "broker " + broker.brokerId() + " does not push";
        }
        if (obstacle != null && insists()) {
            throw new KeraException("InvalidArgument", "shared_memory is 'always', but " + obstacle, false);
        }
        return obstacle == null;
    }

    private void cannotPush(Exception error) {
        if (insists() && error instanceof KeraException known) {
            throw known;
        }
        if (TOLD.add(broker.pushUnixPath())) {
            LOG.info("the memory of broker {} cannot be read in place; chunks are copied: {}", broker.brokerId(),
                    error.getMessage());
        }
        pull();
    }

    /** Pull from now on, for {@link #PUSH_AGAIN_MS}, or up to the end of the piece if it has one. */
    private void pull() {
        pullUntil = piece.end == null ? Deadline.afterMs(PUSH_AGAIN_MS) : Deadline.never();
    }

    private void finish() {
        if (source != null) {
            Source finished = source;
            source = null;
            try {
                finished.finish();
            } catch (IOException error) {
                finished.close(); // it cannot be reused
            }
        }
    }

    private void drop() {
        if (source != null) {
            source.close();
            source = null;
        }
    }

    // -- failures --------------------------------------------------------------------------------------------------

    private void failed(IOException error) {
        if (atEnd()) { // only the source's end message was missing
            stretch = null;
            drop();
            done = true;
            return;
        }
        if (source instanceof PushChannel && error instanceof ProtocolException) {
            stretch = null;
            drop();
            cannotPush(new KeraException("ProtocolError", error.getMessage(), false));
            return;
        }
        failed(Refused.failureOf(error));
    }

    private void failed(Wire.Failure error) {
        stretch = null;
        drop();
        failure = error;
        failedBrokerId = broker.brokerId();
        broker = null;
    }

    /** Ask the service where to go on; it waits until it knows. Throws {@link KeraException} if it raises an error. */
    private void route() {
        ObjectNode params = Planner.JSON.createObjectNode();
        params.set("connection", piece.connection);
        Token token = piece.settings.access().token();
        params.put("token", token == null ? null : token.text()).put("reader", reader).put("stream", piece.stream)
                .put("stream_id", piece.streamId).put("streamlet", piece.streamlet).put("entry", piece.entry);
        params.set("position", next.toJson());
        params.set("end", piece.end == null ? null : piece.end.toJson());
        params.put("fail_on_data_loss", piece.failOnDataLoss).put("shared_memory", piece.sharedMemory)
                .put("progressed", progressed);
        if (failure == null) {
            params.putNull("failed");
        } else {
            ObjectNode error = params.putObject("failed").put("broker_id", failedBrokerId).putObject("error");
            error.put("code", failure.code()).put("message", failure.message()).put("retriable", failure.retriable());
            ObjectNode attributes = error.putObject("attributes");
            for (Map.Entry<String, String> each : failure.attributes().entrySet()) {
                attributes.put(each.getKey(), each.getValue());
            }
        }
        routes++;
        JsonNode result = service.get().call("route", params);
        progressed = false;
        failure = null;
        if (result.hasNonNull("lost")) {
            losses.add(result.get("lost").asText());
        }
        if (result.path("end").asBoolean()) {
            done = true;
            return;
        }
        broker = Broker.parse(result.get("broker"));
        next = Position.parse(result.get("position"));
        done = atEnd();
    }
}
