package kera.wire;

import java.io.IOException;
import java.io.InterruptedIOException;
import java.net.ProtocolException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.ClosedByInterruptException;
import java.util.concurrent.TimeUnit;

/**
 * A connection to a broker's push socket: its messages, and the memory that they are about. See {@code docs/push.md}.
 * Its lanes are used one after the other; between two of them it may be kept for other readers.
 */
final class PushConnection implements Pool.Idle {

    static final int HELLO = 0;
    static final int RUNS = 1;
    static final int END = 2;
    static final int ALIVE = 3;
    static final int REFUSED = 5;
    static final int SUBSCRIBE = 16;
    static final int TAKEN = 18;
    static final int RELEASE = 19;
    static final int OPEN = 21;

    private static final int VERSION = 2;
    private static final int HEAD_BYTES = 8;
    private static final int BODY_BYTES_MAX = 1 << 20;
    /** After so many intervals without a word of a broker, somebody else is asked. */
    private static final int SILENT_INTERVALS_MAX = 5;
    private static final long WINDOW_BYTES_MAX = 64 << 20;
    private static final int WINDOW_SHARE_MAX = 8;
    private static final String WAY_OUT = "run as the broker's user, or set shared_memory to never";

    private static final Pool<PushConnection> IDLE = new Pool<>();

    /** Where one leads: a broker's socket, and a memory domain there. */
    private record Place(String path, String domain) {
    }

    /** A message of the broker's. */
    record Message(int kind, byte[] body) {
    }

    final Arena arena;
    private final Link link;
    private final Place place;
    private final int brokerId;
    /** How often the broker says that it is there; 0: it does not. */
    private final long aliveIntervalMs;
    /** For how long a message has been waited for, since the last one came: who does not wait hears nothing either. */
    private long waitedNanos;
    private int lanes;
    private ByteBuffer received = ByteBuffer.allocate(1 << 14).order(ByteOrder.LITTLE_ENDIAN);
    /** How much of what was received has been given out. */
    private int given;

    private PushConnection(Link link, String domain, long timeoutMs) throws IOException {
        this.link = link;
        place = new Place(link.address(), domain);
        Wire.Hello hello = greeting(timeoutMs);
        brokerId = hello.brokerId();
        aliveIntervalMs = hello.aliveIntervalMs();
        if (hello.arenaBytes() == 0) { // descriptors do not get here, and files are the broker's own
            throw new KeraException("InvalidArgument", "the broker at " + link.address()
                    + " is of another user, whose files cannot be opened; " + WAY_OUT, false);
        }
        if (!hello.memoryDomain().equals(domain)) {
            byte[] body = Wire.pushOpen(domain);
            link.send(message(OPEN, body.length).put(body).flip());
            hello = greeting(timeoutMs);
        }
        try {
            arena = Arena.of(link.address(), domain, hello);
        } catch (ProtocolException | ClosedByInterruptException error) {
            throw error;
        } catch (IOException | IllegalArgumentException error) {
            throw new KeraException("InvalidArgument", "cannot map the broker's memory " + hello.arenaPath() + ": "
                    + error.getMessage() + "; " + WAY_OUT, false);
        }
    }

    private Wire.Hello greeting(long timeoutMs) throws IOException {
        Message first;
        try {
            first = receive(Deadline.afterMs(timeoutMs));
        } catch (ProtocolException | InterruptedIOException | ClosedByInterruptException error) {
            throw error;
        } catch (IOException error) { // it closes the connection of whom it does not know, without a word
            throw new IOException(error.getMessage() + ", at once; " + WAY_OUT, error);
        }
        if (first == null) {
            throw new IOException("no greeting from " + link.address() + " in time");
        }
        if (first.kind == REFUSED) {
            Wire.Failure failure = Wire.failure(first.body);
            throw new IOException(failure.message());
        }
        Wire.Hello hello = first.kind == HELLO ? Wire.hello(first.body) : null;
        if (hello == null || hello.version() != VERSION) {
            throw new ProtocolException(link.address() + " is not a push channel of version " + VERSION);
        }
        return hello;
    }

    /**
     * A connection to a broker for what is of a memory domain, perhaps one that was used before. Throws
     * {@link KeraException} or {@link ProtocolException} when it is of no use to try again, another
     * {@link IOException} when it is.
     */
    static PushConnection to(Broker broker, String domain, long timeoutMs) throws IOException {
        String path = broker.pushUnixPath();
        PushConnection kept = IDLE.take(new Place(path, domain));
        PushConnection made = kept == null ? open(path, domain, timeoutMs) : kept;
        if (made.brokerId != broker.brokerId()) {
            made.close();
            throw new IOException("broker " + made.brokerId + " is at " + path + ", not broker " + broker.brokerId());
        }
        return made;
    }

    private static PushConnection open(String path, String domain, long timeoutMs) throws IOException {
        Link link;
        try {
            link = Link.unix(path, timeoutMs);
        } catch (InterruptedIOException | ClosedByInterruptException error) {
            throw error;
        } catch (IOException error) {
            if (String.valueOf(error.getMessage()).contains("Permission denied")) {
                throw new KeraException("InvalidArgument", error.getMessage() + "; " + WAY_OUT, false);
            }
            throw error;
        }
        try {
            return new PushConnection(link, domain, timeoutMs);
        } catch (IOException | RuntimeException error) {
            link.close();
            throw error;
        }
    }

    /** The window that the broker grants who wants {@code wanted}, see {@code kera.core.push}. */
    long window(long wanted) {
        return Math.max(1, Math.min(Math.min(wanted, WINDOW_BYTES_MAX), arena.slots * arena.slotBytes
                / WINDOW_SHARE_MAX));
    }

    /** Begin a lane; its number. */
    int subscribe(Piece piece, Position start) throws IOException {
        lanes++;
        byte[] body = Wire.subscribe(piece, lanes, start);
        link.send(message(SUBSCRIBE, body.length).put(body).flip());
        return lanes;
    }

    /** Tell what was taken, if anything was, and which slots are let go of. */
    void send(long takenBytes, ByteBuffer released) throws IOException {
        ByteBuffer messages = ByteBuffer.allocate(2 * HEAD_BYTES + Long.BYTES + released.remaining())
                .order(ByteOrder.LITTLE_ENDIAN);
        if (takenBytes > 0) {
            messages.put(message(TAKEN, Long.BYTES).putLong(takenBytes).flip());
        }
        if (released.hasRemaining()) {
            messages.put(message(RELEASE, released.remaining()).put(released).flip());
        }
        link.send(messages.flip());
    }

    private static ByteBuffer message(int kind, int bodyBytes) {
        return ByteBuffer.allocate(HEAD_BYTES + bodyBytes).order(ByteOrder.LITTLE_ENDIAN).putInt(bodyBytes)
                .put((byte) kind).put(new byte[3]);
    }

    /**
     * The next message that says more than that the broker is there; null: none has come in time. Throws an
     * {@link IOException} when the broker has been silent for too long.
     */
    Message receive(long deadline) throws IOException {
        while (true) {
            Message next = take(deadline);
            if (next == null || next.kind != ALIVE) {
                return next;
            }
        }
    }

    private Message take(long deadline) throws IOException {
        while (true) {
            int wanted = HEAD_BYTES;
            int there = received.position() - given;
            if (there >= HEAD_BYTES) {
                long bodyBytes = Integer.toUnsignedLong(received.getInt(given));
                int kind = received.get(given + 4) & 0xFF;
                if (bodyBytes > BODY_BYTES_MAX) {
                    throw new ProtocolException("a push message of " + bodyBytes + " bytes is over the limit of "
                            + BODY_BYTES_MAX);
                }
                if (kind != HELLO && kind != RUNS && kind != END && kind != ALIVE && kind != REFUSED) {
                    throw new ProtocolException("a push message of unknown kind " + kind + "; is the peer newer?");
                }
                wanted = HEAD_BYTES + (int) bodyBytes;
                if (there >= wanted) {
                    byte[] body = new byte[(int) bodyBytes];
                    received.get(given + HEAD_BYTES, body);
                    given += wanted;
                    return new Message(kind, body);
                }
            }
            makeRoom(wanted);
            long silence = Deadline.never();
            if (aliveIntervalMs > 0) {
                silence = System.nanoTime() + Deadline.nanos(SILENT_INTERVALS_MAX * aliveIntervalMs) - waitedNanos;
            }
            long begun = System.nanoTime();
            if (link.receive(received, Deadline.earlier(deadline, silence)) > 0) {
                waitedNanos = 0;
                continue;
            }
            waitedNanos += System.nanoTime() - begun;
            if (Deadline.passed(silence)) {
                throw new IOException("broker " + brokerId + " at " + link.address() + " has said nothing for "
                        + TimeUnit.NANOSECONDS.toMillis(waitedNanos) / 1000.0 + " s");
            }
            return null;
        }
    }

    /** Whether all that has come since it was kept is that the broker is there. */
    private boolean onlyAlive() {
        try {
            while (true) {
                Message message = take(System.nanoTime());
                if (message == null) {
                    return true;
                }
                if (message.kind != ALIVE) {
                    return false;
                }
            }
        } catch (IOException error) {
            return false;
        }
    }

    private void makeRoom(int bytes) {
        received.flip().position(given);
        if (received.capacity() < bytes) {
            received = ByteBuffer.allocate(bytes).order(ByteOrder.LITTLE_ENDIAN).put(received);
        } else {
            received.compact();
        }
        given = 0;
    }

    /** Leave it to others: no lane is on it any more, and nothing is leased. */
    void keep() {
        IDLE.give(place, this);
    }

    @Override
    public boolean usable() {
        return onlyAlive() && received.position() == given && link.usable();
    }

    @Override
    public void close() {
        link.close();
    }
}
