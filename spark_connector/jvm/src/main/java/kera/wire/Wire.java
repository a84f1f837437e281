package kera.wire;

import java.net.ProtocolException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;

/**
 * Hand-written encoding of the few protobuf messages that readers and writers use: see {@code proto/kera/v1}. Invalid
 * messages raise a {@link ProtocolException}; unknown fields are skipped.
 */
final class Wire {

    private static final int VARINT = 0;
    private static final int FIXED64 = 1;
    private static final int BYTES = 2;
    private static final int FIXED32 = 5;
    private static final int VARINT_BITS_MAX = 64;

    /** A request to write one chunk, with the stream's durability: {@code MultiWriteChunksRequest}. */
    static final byte[] ONE_CHUNK = new Writer().varint(3, 1).done();

    private Wire() {
    }

    /** An error from a broker, {@code kera.v1.Error}. The values of its attributes are JSON text. */
    record Failure(String code, String message, boolean retriable, Map<String, String> attributes) {

        /** A failure that this client has seen itself, and that may be temporary. */
        static Failure unavailable(String message) {
            return new Failure("unavailable", message, true, Map.of());
        }
    }

    /** {@code PushHello}. */
    record Hello(int version, int brokerId, String arenaPath, long arenaBytes, long slots, long slotBytes, long slotsAt,
            long rowsAt, long rowBytes, long aliveIntervalMs, String memoryDomain) {
    }

    /** {@code PushEnd}. */
    record LaneEnd(int lane, int reason, Position next, Failure error) {
    }

    /** {@code MultiReadChunksResponse} to a request with one range. */
    record ReadResponse(Position next, long lengthBytes, Failure error) {
    }

    /** {@code ChunkStatus}; {@code position} is null where the broker does not know it. */
    record ChunkStatus(Failure error, int entry, Position position, boolean duplicate) {
    }

    static byte[] readRequest(Piece piece, Position start, int waitMs) {
        Writer range = new Writer();
        writeRange(range, 1, piece, start);
        return new Writer().bytes(2, range.done()).varint(3, piece.settings.fetchBytesMax()).varint(4, waitMs)
                .bytes(5, utf8(piece.settings.consumerGroup())).done();
    }

    static byte[] subscribe(Piece piece, int lane, Position start) {
        Writer row = new Writer().varint(1, Integer.toUnsignedLong(lane));
        writeRange(row, 2, piece, start);
        return new Writer().bytes(1, utf8(piece.settings.consumerGroup()))
                .varint(2, piece.settings.prefetchBytesMax()).bytes(3, row.done()).done();
    }

    /** Write the start of a range as field {@code field}, and its end, if it has one, as the field after that. */
    private static void writeRange(Writer out, int field, Piece piece, Position start) {
        out.bytes(field, cursor(piece, start));
        if (piece.end != null) {
            out.bytes(field + 1, cursor(piece, piece.end));
        }
    }

    private static byte[] cursor(Piece piece, Position at) {
        return new Writer().varint(1, piece.streamId).varint(2, Integer.toUnsignedLong(piece.streamlet))
                .varint(3, Integer.toUnsignedLong(piece.entry)).varint(4, at.group())
                .varint(5, Integer.toUnsignedLong(at.segment())).varint(6, Integer.toUnsignedLong(at.offset())).done();
    }

    /** {@code PushOpen}. */
    static byte[] pushOpen(String domain) {
        return new Writer().bytes(1, utf8(domain)).done();
    }

    /** {@code AuthenticateRequest} with a token. */
    static byte[] authenticateRequest(String token) {
        return new Writer().bytes(1, utf8(token)).done();
    }

    private static byte[] utf8(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static Hello hello(byte[] data) throws ProtocolException {
        Reader in = new Reader(data, 0, data.length);
        int version = 0;
        int brokerId = 0;
        String path = "";
        String domain = "default";
        long[] sizes = new long[12];
        while (in.next()) {
            switch (in.field) {
                case 1 -> version = (int) in.varint();
                case 2 -> brokerId = (int) in.varint();
                case 4 -> path = in.text();
                case 5, 8, 9 -> sizes[in.field] = in.varint();
                case 12 -> domain = in.text();
                case 6, 7, 10, 11 -> sizes[in.field] = in.varint() & 0xFFFF_FFFFL;
                default -> in.skip();
            }
        }
        return new Hello(version, brokerId, path, sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], sizes[10],
                sizes[11], domain);
    }

    static LaneEnd laneEnd(byte[] data) throws ProtocolException {
        Reader in = new Reader(data, 0, data.length);
        int lane = 0;
        int reason = 0;
        Position next = new Position(0, 0, 0);
        Failure error = null;
        while (in.next()) {
            switch (in.field) {
                case 1 -> lane = (int) in.varint();
                case 2 -> reason = (int) in.varint();
                case 3 -> next = position(in.message());
                case 4 -> error = failure(in.message());
                default -> in.skip();
            }
        }
        return new LaneEnd(lane, reason, next, error);
    }

    static ReadResponse readResponse(byte[] data) throws ProtocolException {
        Reader in = new Reader(data, 0, data.length);
        Failure whole = null;
        ReadResponse result = null;
        while (in.next()) {
            switch (in.field) {
                case 2 -> whole = failure(in.message());
                case 3 -> {
                    if (result != null) {
                        throw new ProtocolException("an answer has more results than were asked for");
                    }
                    result = readResult(in.message());
                }
                default -> in.skip();
            }
        }
        if (whole != null) {
            return new ReadResponse(new Position(0, 0, 0), 0, whole);
        }
        if (result == null) {
            throw new ProtocolException("an answer has no result");
        }
        return result;
    }

    private static ReadResponse readResult(Reader in) throws ProtocolException {
        Failure error = null;
        Position next = new Position(0, 0, 0);
        long lengthBytes = 0;
        while (in.next()) {
            switch (in.field) {
                case 1 -> error = failure(in.message());
                case 2 -> next = position(in.message());
                case 3 -> lengthBytes = in.varint() & 0xFFFF_FFFFL;
                default -> in.skip();
            }
        }
        return new ReadResponse(next, lengthBytes, error);
    }

    /** The status of the one chunk that was sent; a failure of the whole request becomes a status with an error. */
    static ChunkStatus writeResponse(byte[] data) throws ProtocolException {
        Reader in = new Reader(data, 0, data.length);
        Failure whole = null;
        ChunkStatus status = null;
        while (in.next()) {
            switch (in.field) {
                case 2 -> whole = failure(in.message());
                case 3 -> {
                    if (status != null) {
                        throw new ProtocolException("an answer has more statuses than chunks were sent");
                    }
                    status = chunkStatus(in.message());
                }
                default -> in.skip();
            }
        }
        if (whole != null) {
            return new ChunkStatus(whole, 0, null, false);
        }
        if (status == null) {
            throw new ProtocolException("an answer has no status");
        }
        return status;
    }

    private static ChunkStatus chunkStatus(Reader in) throws ProtocolException {
        Failure error = null;
        long[] numbers = new long[9];
        while (in.next()) {
            switch (in.field) {
                case 1 -> error = failure(in.message());
                case 2, 3, 4, 5, 8 -> numbers[in.field] = in.varint();
                default -> in.skip();
            }
        }
        Position position = numbers[3] == 0 ? null : new Position(numbers[3], (int) numbers[4], (int) numbers[5]);
        return new ChunkStatus(error, (int) numbers[2], position, numbers[8] != 0);
    }

    static Failure failure(byte[] data) throws ProtocolException {
        return failure(new Reader(data, 0, data.length));
    }

    private static Failure failure(Reader in) throws ProtocolException {
        String code = "";
        String message = "";
        boolean retriable = false;
        Map<String, String> attributes = new LinkedHashMap<>();
        while (in.next()) {
            switch (in.field) {
                case 1 -> code = in.text();
                case 2 -> message = in.text();
                case 3 -> retriable = in.varint() != 0;
                case 4 -> {
                    String name = "";
                    String value = "";
                    Reader pair = in.message();
                    while (pair.next()) {
                        switch (pair.field) {
                            case 1 -> name = pair.text();
                            case 2 -> value = pair.text();
                            default -> pair.skip();
                        }
                    }
                    attributes.put(name, value);
                }
                default -> in.skip();
            }
        }
        return new Failure(code, message, retriable, attributes);
    }

    private static Position position(Reader in) throws ProtocolException {
        long group = 0;
        int segment = 0;
        int offset = 0;
        while (in.next()) {
            switch (in.field) {
                case 4 -> group = in.varint();
                case 5 -> segment = (int) in.varint();
                case 6 -> offset = (int) in.varint();
                default -> in.skip();
            }
        }
        if (group < 0 || segment < 0 || offset < 0) {
            throw new ProtocolException("a cursor is beyond all that there can be");
        }
        return new Position(group, segment, offset);
    }

    /** A message being written; fields that are 0 or empty are left out, as proto3 does. */
    private static final class Writer {
        private byte[] data = new byte[64];
        private int size;

        Writer varint(int field, long value) {
            if (value != 0) {
                raw((long) field << 3 | VARINT);
                raw(value);
            }
            return this;
        }

        Writer bytes(int field, byte[] value) {
            if (value.length != 0) {
                raw((long) field << 3 | BYTES);
                raw(value.length);
                room(value.length);
                System.arraycopy(value, 0, data, size, value.length);
                size += value.length;
            }
            return this;
        }

        byte[] done() {
            return Arrays.copyOf(data, size);
        }

        private void raw(long value) {
            room(10);
            long rest = value;
            while ((rest & ~0x7FL) != 0) {
                data[size++] = (byte) (rest & 0x7F | 0x80);
                rest >>>= 7;
            }
            data[size++] = (byte) rest;
        }

        private void room(int bytes) {
            if (data.length - size < bytes) {
                data = Arrays.copyOf(data, Math.max(2 * data.length, size + bytes));
            }
        }
    }

    /** A message being read: {@link #next} to each field, then exactly one of the others for its value. */
    private static final class Reader {
        private final byte[] data;
        private final int end;
        private int at;
        private int kind;
        int field;

        Reader(byte[] data, int at, int end) {
            this.data = data;
            this.at = at;
            this.end = end;
        }

        boolean next() throws ProtocolException {
            if (at == end) {
                return false;
            }
            long tag = raw();
            field = (int) (tag >>> 3);
            kind = (int) (tag & 7);
            return true;
        }

        long varint() throws ProtocolException {
            expect(VARINT);
            return raw();
        }

        String text() throws ProtocolException {
            expect(BYTES);
            int length = length();
            at += length;
            return new String(data, at - length, length, StandardCharsets.UTF_8);
        }

        Reader message() throws ProtocolException {
            expect(BYTES);
            int length = length();
            at += length;
            return new Reader(data, at - length, at);
        }

        void skip() throws ProtocolException {
            switch (kind) {
                case VARINT -> raw();
                case BYTES -> at += length();
                case FIXED64 -> advance(8);
                case FIXED32 -> advance(4);
                default -> throw new ProtocolException("a message has a field of unknown kind " + kind);
            }
        }

        private void expect(int wanted) throws ProtocolException {
            if (kind != wanted) {
                throw new ProtocolException("field " + field + " of a message is of kind " + kind + ", not " + wanted);
            }
        }

        private int length() throws ProtocolException {
            long length = raw();
            if (length < 0 || length > end - at) {
                throw new ProtocolException("message cut short");
            }
            return (int) length;
        }

        private void advance(int bytes) throws ProtocolException {
            if (bytes > end - at) {
                throw new ProtocolException("message cut short");
            }
            at += bytes;
        }

        private long raw() throws ProtocolException {
            long value = 0;
            for (int shift = 0; shift < VARINT_BITS_MAX && at < end; shift += 7) {
                byte next = data[at++];
                value |= (next & 0x7FL) << shift;
                if (next >= 0) {
                    return value;
                }
            }
            throw new ProtocolException("message cut short");
        }
    }
}
