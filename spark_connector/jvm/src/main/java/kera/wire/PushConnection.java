package kera.wire;

import java.io.IOException;
import java.io.InterruptedIOException;
import java.net.ProtocolException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.ClosedByInterruptException;
import java.util.concurrent.TimeUnit;

/**
 * A connection to a broker's push socket: its messages, and the memory that they refer to. See {@code docs/push.md}.
 * Its lanes are used one after the other; between two lanes it may be kept for other readers.
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
    /** After this many intervals without a message, the broker counts as lost. */
    private static final int SILENT_INTERVALS_MAX = 5;
    private static final long WINDOW_BYTES_MAX = 64 << 20;
    private static final int WINDOW_SHARE_MAX = 8;
    private static final String WAY_OUT = "run as the broker's user, or set shared_memory to never";

    private static final Pool<PushConnection> IDLE = new Pool<>();

    /** The key of the pool: a broker's socket, and a memory domain there. */
    private record Place(String path, String domain) {
    }

    /** A message from the broker. */
    record Message(int kind, byte[] body) {
    }

    final Arena arena;
    private final Link link;
    private final Place place;
    private final int brokerId;
    /** Interval of the broker's ALIVE messages; 0 if it sends none. */
    private final long aliveIntervalMs;
    /** Time spent waiting since bytes last arrived. Only waits count: without a wait, nothing is received either. */
    private long waitedNanos;
    private int lanes;
    private ByteBuffer received = ByteBuffer.allocate(1 << 14).order(ByteOrder.LITTLE_ENDIAN);
    /** The number of received bytes that have been returned as messages. */
    private int given;

    private PushConnection(Link link, String domain, long timeoutMs) throws IOException {
        this.link = link;
        place = new Place(link.address(), domain);
        Wire.Hello hello = greeting(timeoutMs);
        brokerId = hello.brokerId();
        aliveIntervalMs = hello.aliveIntervalMs();
        if (hello.arenaBytes() == 0) { // Java cannot receive descriptors, and the files belong to the broker's user
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
        } catch (IOException error) { // a broker closes connections of unknown users without a message
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
     * A new or kept connection to a broker for a memory domain. Throws {@link KeraException} or
     * {@link ProtocolException} if a retry would not help, another {@link IOException} if it may.
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

    /** The window that the broker grants to a reader that wants {@code wanted} bytes, see {@code kera.core.push}. */
    long window(long wanted) {
        return Math.max(1, Math.min(Math.min(wanted, WINDOW_BYTES_MAX), arena.slots * arena.slotBytes
                / WINDOW_SHARE_MAX));
    }

    /** Begin a lane, and return its number. */
    int subscribe(Piece piece, Position start) throws IOException {
        lanes++;
        byte[] body = Wire.subscribe(piece, lanes, start);
        link.send(message(SUBSCRIBE, body.length).put(body).flip());
        return lanes;
    }

    /** Send the number of bytes taken and the slots released, if there are any. */
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
     * The next message except ALIVE; null if none arrives in time. Throws an {@link IOException} if the broker has been
     * silent for too long.
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

    /** Whether only ALIVE messages have arrived since the connection was kept. */
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

    /** Keep the connection for other readers; it must have no lane and no leases. */
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
