package kera.wire;

import java.io.IOException;
import java.net.ProtocolException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayDeque;
import java.util.Queue;

/** A range that a broker on this host pushes: the broker sends the places of the chunks in its memory. */
final class PushChannel implements Source {

    private static final int RUN_BYTES = 64;
    /** The window is reopened when 1 / WINDOW_PARTS of it has been taken, so that the broker need not wait. */
    private static final int WINDOW_PARTS = 4;

    /** Consecutive chunks in a slot; the numbers are those of the message, not yet checked. */
    private record Run(long slot, long generation, long at, long length, Position start) {
    }

    private final Piece piece;
    private final PushConnection connection;
    private final int lane;
    private final long windowBytes;
    private final Queue<Run> runs = new ArrayDeque<>();
    private Position next;
    private End end;
    private long takenBytes;
    private ByteBuffer released = ByteBuffer.allocate(256).order(ByteOrder.LITTLE_ENDIAN);
    private boolean closed;

    PushChannel(Piece piece, Broker broker, Position start) throws IOException {
        this.piece = piece;
        next = start;
        connection = PushConnection.to(broker, piece.memoryDomain, piece.settings.connectTimeoutMs());
        windowBytes = connection.window(piece.settings.prefetchBytesMax());
        try {
            lane = connection.subscribe(piece, start);
        } catch (IOException error) {
            connection.close();
            throw error;
        }
    }

    @Override
    public Event next(long deadline) throws IOException {
        while (runs.isEmpty() && end == null) {
            tell(); // completely: the broker may wait for it, and the task may be away for long afterwards
            // A range without an end may have no chunks for long. A range with an end exists: the broker must answer.
            long patience = piece.end == null ? Deadline.never() : Deadline.afterMs(piece.settings.requestTimeoutMs());
            PushConnection.Message message = connection.receive(Deadline.earlier(deadline, patience));
            if (message == null) {
                if (Deadline.passed(patience)) {
                    throw new IOException("broker has pushed nothing within "
                            + piece.settings.requestTimeoutMs() / 1000.0 + " s");
                }
                return null;
            }
            take(message);
        }
        Run run = runs.poll();
        return run == null ? end : begin(run);
    }

    private void take(PushConnection.Message message) throws ProtocolException {
        ByteBuffer body = ByteBuffer.wrap(message.body()).order(ByteOrder.LITTLE_ENDIAN);
        switch (message.kind()) {
            case PushConnection.RUNS -> {
                if (body.remaining() % RUN_BYTES != 0) {
                    throw new ProtocolException("a push message of runs has an invalid length");
                }
                for (int at = 0; at < body.limit(); at += RUN_BYTES) {
                    requireLane(body.getInt(at));
                    runs.add(new Run(Integer.toUnsignedLong(body.getInt(at + 4)), body.getLong(at + 8),
                            body.getLong(at + 16), Integer.toUnsignedLong(body.getInt(at + 24)),
                            new Position(body.getLong(at + 32), body.getInt(at + 28), body.getInt(at + 40))));
                }
            }
            case PushConnection.END -> {
                Wire.LaneEnd came = Wire.laneEnd(message.body());
                requireLane(came.lane());
                end = new End(reason(came.reason()), came.next(), came.error());
                if (end.reason() == Reason.FAILED && end.error() == null) {
                    throw new ProtocolException("a lane has failed without an error");
                }
            }
            default -> throw new ProtocolException("a broker pushed a message of kind " + message.kind());
        }
    }

    private void requireLane(int number) throws ProtocolException {
        if (number != lane) {
            throw new ProtocolException("something was pushed for lane " + Integer.toUnsignedString(number)
                    + ", which is not there");
        }
    }

    private static Reason reason(int number) throws ProtocolException {
        return switch (number) {
            case 1 -> Reason.REACHED;
            case 2 -> Reason.MOVED;
            case 3 -> Reason.FAILED;
            case 4 -> Reason.PULL;
            default -> throw new ProtocolException("a lane has ended for unknown reason " + number
                    + "; is the peer newer?");
        };
    }

    private Stretch begin(Run run) throws IOException {
        ByteBuffer bytes = connection.arena.bytes(run.slot, run.at, run.length);
        if (run.start.isBefore(next) || run.start.segment() < 0 || run.start.offset() < 0
                || run.start.offset() > Integer.MAX_VALUE - run.length) {
            throw new ProtocolException("a run at " + run.start + " was pushed after " + next);
        }
        next = run.start.plus((int) run.length);
        takenBytes += run.length;
        if (WINDOW_PARTS * takenBytes >= windowBytes) {
            tell();
        }
        return new Stretch(bytes, run.start, next, connection.arena, (int) run.slot, run.generation);
    }

    private void tell() throws IOException {
        if (takenBytes > 0 || released.position() > 0) {
            connection.send(takenBytes, released.flip());
            takenBytes = 0;
            released.clear();
        }
    }

    @Override
    public void giveBack(Stretch stretch) {
        if (!released.hasRemaining()) {
            released = ByteBuffer.allocate(2 * released.capacity()).order(ByteOrder.LITTLE_ENDIAN).put(released.flip());
        }
        released.putInt(stretch.slot());
    }

    @Override
    public void finish() throws IOException {
        if (!closed && end != null && runs.isEmpty()) {
            tell();
            closed = true;
            connection.keep();
        }
        close();
    }

    /** Close the connection, which ends all leases. */
    @Override
    public void close() {
        if (!closed) {
            closed = true;
            connection.close();
        }
    }
}
