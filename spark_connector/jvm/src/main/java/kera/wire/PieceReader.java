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
 * The chunks of a piece, in order, wherever they are: each once, none left out, however they come.
 *
 * <p>A broker of this host pushes them, that is, they are read where they lie in its memory; from others they are
 * pulled. Whatever fails is told to the service, which waits, and says where to go on or that it is of no use. Belongs
 * to one thread; ends with an {@link InterruptedIOException}, a {@link ClosedByInterruptException} or, while the
 * service is asked, an InterruptedException when that is interrupted.
 */
public final class PieceReader implements Closeable {

    /** A broker that could not push is asked for copies for so long, unless the piece has an end: then to that. */
    private static final long PUSH_AGAIN_MS = 1_000;
    private static final Logger LOG = LoggerFactory.getLogger(PieceReader.class);
    /** Push sockets that could not be used, and that was said. */
    private static final Set<String> TOLD = ConcurrentHashMap.newKeySet();

    /**
     * What a reader has done so far.
     *
     * @param bytesInPlace of chunks that were read where they lie in a broker's memory
     * @param bytesPulled of chunks that came as copies
     * @param routes how often the planner was asked where to go on
     */
    public record Counters(long chunks, long bytesInPlace, long bytesPulled, long routes) {
    }

    private final Piece piece;
    private final Supplier<? extends Planner> service;
    private final boolean verifyPayload;
    private final String reader = UUID.randomUUID().toString();
    private final List<String> losses = new ArrayList<>();

    /** Where the next chunk is, or behind what was given. */
    private Position next;
    /** Null: it has to be asked for. */
    private Broker broker;
    private Source source;
    private Stretch stretch;
    /** Where the next chunk is in the stretch. */
    private int at;
    private long chunks;
    private long bytesInPlace;
    private long bytesPulled;
    private long routes;
    private boolean done;
    private boolean closed;
    private long pullUntil = Deadline.afterMs(0);
    /** Whether anything came since the service was asked. */
    private boolean progressed;
    /** What the service is to be told of, and about which broker. */
    private Wire.Failure failure;
    private int failedBrokerId;

    /** {@code payloadWanted} false: nobody looks at payloads, so their checksums are not looked at either. */
    public PieceReader(Piece piece, Supplier<? extends Planner> service, boolean payloadWanted) {
        this.piece = piece;
        this.service = service;
        verifyPayload = payloadWanted && piece.settings.verifyChecksums();
        next = piece.start;
        broker = piece.broker;
        done = atEnd();
    }

    /** The next chunk; the one before is given back. Null: the piece has given all. */
    public Chunk next() throws IOException {
        return next(Deadline.never());
    }

    /**
     * The next chunk if one comes in time; the one before is given back. Null: none did, or the piece {@link #ended}.
     * It may take longer while the service is asked for a broker.
     */
    public Chunk nextWithin(long timeoutMs) throws IOException {
        return next(Deadline.afterMs(timeoutMs));
    }

    /**
     * The chunk behind {@code last}, which was given last and stays, if it is at hand and both are small; else null. It
     * must be asked whether it is {@link Chunk#intact}, as the others.
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

    /** Whether the piece has given all that there will be. */
    boolean ended() {
        return done && stretch == null;
    }

    /** What was lost of the piece, where that is not an error. */
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

    /** The next chunk of the stretch; null: ask again, as there is no more of it, or what came has no records. */
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
        if (chunk == null || !chunk.intact()) { // after the look at the bytes: they may have been others'
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

    /** What follows begins with `chunk` again, which was given last: it is not in the broker's memory any more. */
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
                    pull(); // that tells what is wrong, if it is
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

    /** Whether to have the broker push. Throws {@link KeraException} when that is a must and cannot be. */
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

    /** Have the piece pulled, for a while or up to its end. */
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
                finished.close(); // nothing more is wanted of it
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
        if (atEnd()) { // only its end was missing
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

    /** Ask the service where to go on; it waits until there is an answer. Throws {@link KeraException}. */
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
