package kera.wire;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import kera.columns.Columns;
import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.PrintStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.concurrent.SynchronousQueue;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructType;

/**
 * Gives bytes to the decoders of Spark's executors, thousands of times a second, and answers with the outcomes. Both
 * directions are binary: an input is a kind, a length, and its bytes; several inputs are answered in their order.
 */
final class Decoding {
    private static final int READ = 0;
    private static final int REFUSED = 1;
    private static final int DEFECT = 2;
    /** The memory before the end of a mapping, so that a read behind it is an InternalError. */
    private static final int ROOM_BYTES = 1 << 20;
    private static final int BEHIND_BYTES = 1 << 20;
    private static final int EVENTS_MAX = 64;
    private static final int CHUNKS_MAX = 64;
    private static final long WAIT_MS = 500;
    private static final Position START = new Position(1, 1, 0);
    private static final Base64.Decoder BASE64 = Base64.getDecoder();

    /** A schema, and the columns that Spark requests. */
    private record Wanted(byte[] schema, boolean typed, StructType columns) {
    }

    private final List<Wanted> wanted = new ArrayList<>();
    private final ByteBuffer room;
    private final Piece piece;
    private final Peer frames;
    private final Peer pushing;
    private final Broker broker;

    /** Works in the current folder. */
    private Decoding() throws IOException {
        Path file = Files.createTempFile(Path.of("."), "room", "");
        try (FileChannel channel = FileChannel.open(file, StandardOpenOption.READ, StandardOpenOption.WRITE)) {
            room = channel.map(FileChannel.MapMode.READ_WRITE, 0, ROOM_BYTES + BEHIND_BYTES);
            channel.truncate(ROOM_BYTES);
        }
        Files.delete(file);
        ServerSocketChannel tcp = ServerSocketChannel.open()
                .bind(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0));
        String push = Path.of("push.sock").toString();
        ServerSocketChannel unix = ServerSocketChannel.open(StandardProtocolFamily.UNIX)
                .bind(UnixDomainSocketAddress.of(push));
        frames = new Peer(tcp);
        pushing = new Peer(unix);
        int port = ((InetSocketAddress) tcp.getLocalAddress()).getPort();
        piece = Piece.parse("""
                {"stream": "events", "stream_id": 7, "streamlet": 0, "entry": 0, "start": [1, 1, 0], "end": null,
                 "first_record": 0, "records": 0, "bytes": 0, "typed": false, "schema": "", "schema_id": 1,
                 "fail_on_data_loss": true, "shared_memory": "auto", "connection": {}, "broker": null, "hosts": [],
                 "settings": {"fetch_bytes_max": 1000000, "prefetch_bytes_max": 1000000, "request_timeout_ms": 500,
                              "connect_timeout_ms": 2000, "verify_checksums": true, "transport": "tcp",
                              "consumer_group": ""}}""", null);
        broker = new Broker(1, "", "127.0.0.1:" + port, "", push);
    }

    public static void main(String[] arguments) throws IOException {
        DataOutputStream out = new DataOutputStream(new BufferedOutputStream(System.out, 1 << 16));
        System.setOut(new PrintStream(System.err, true, StandardCharsets.UTF_8)); // loggers write to System.out
        DataInputStream in = new DataInputStream(new BufferedInputStream(System.in, 1 << 16));
        Decoding decoding = new Decoding();
        while (true) {
            int kind;
            try {
                kind = in.readUnsignedByte();
            } catch (EOFException end) {
                return;
            }
            byte[] data = new byte[in.readInt()];
            in.readFully(data);
            String told = "";
            int outcome = READ;
            try {
                decoding.decode(kind, data);
            } catch (IOException | KeraException error) {
                outcome = REFUSED;
            } catch (Throwable error) {
                outcome = DEFECT;
                StackTraceElement[] trace = error.getStackTrace();
                told = error + (trace.length == 0 ? "" : " at " + trace[0]);
            }
            byte[] text = told.getBytes(StandardCharsets.UTF_8);
            out.writeByte(outcome);
            out.writeInt(text.length);
            out.write(text);
            if (in.available() == 0) {
                out.flush();
            }
        }
    }

    private void decode(int kind, byte[] data) throws IOException {
        switch (kind) {
            case 0 -> Wire.hello(data);
            case 1 -> Wire.laneEnd(data);
            case 2 -> Wire.readResponse(data);
            case 3 -> Wire.writeResponse(data);
            case 4 -> Wire.failure(data);
            case 5 -> Frames.require(ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN));
            case 6 -> walk(new Stretch(placed(data), START, START, null, 0, 0));
            case 7 -> columns(data);
            case 8 -> answered(data);
            case 9 -> pushed(data);
            default -> learn(data);
        }
    }

    /** A copy of the bytes at the end of the readable memory. */
    private ByteBuffer placed(byte[] data) throws IOException {
        if (data.length > ROOM_BYTES) {
            throw new IOException("larger than there is room");
        }
        ByteBuffer bytes = room.slice(ROOM_BYTES - data.length, data.length).order(ByteOrder.LITTLE_ENDIAN);
        return bytes.put(0, data);
    }

    private void walk(Stretch stretch) throws IOException {
        Position before = stretch.start();
        int at = 0;
        for (int count = 0; at < stretch.bytes().limit() && count < CHUNKS_MAX; count++) {
            Chunk chunk = Chunk.open(stretch, at, before, piece, true);
            chunk.isFollowedBySmall(at + chunk.chunkBytes());
            before = chunk.next;
            at += chunk.chunkBytes();
        }
    }

    /** Decodes a schema's number and one of its chunks, and reads all values. */
    private void columns(byte[] data) throws IOException {
        ByteBuffer bytes = ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN);
        Wanted one = wanted.get(bytes.getInt() % wanted.size());
        byte[] rest = new byte[bytes.remaining()];
        bytes.get(rest);
        Stretch stretch = new Stretch(placed(rest), START, START, null, 0, 0);
        try (Columns columns = new Columns(one.schema, one.typed, one.columns, "events", 0, 1, null)) {
            Chunk chunk = Chunk.open(stretch, 0, START, piece, true);
            ColumnsHarness.readAnyway(columns.load(chunk, 0, last -> null), one.columns);
        }
    }

    /** Decodes a broker's answer to a request for copies. */
    private void answered(byte[] data) throws IOException {
        frames.say(data);
        FramesChannel channel = new FramesChannel(piece, broker, false, START, Deadline.never());
        try {
            follow(channel);
        } finally {
            channel.close();
        }
    }

    /** Decodes a broker's greeting and its pushed messages. */
    private void pushed(byte[] data) throws IOException {
        pushing.say(data);
        PushChannel channel = new PushChannel(piece, broker, START);
        try {
            follow(channel);
        } finally {
            channel.close();
        }
    }

    private void follow(Source source) throws IOException {
        for (int count = 0; count < EVENTS_MAX; count++) {
            Source.Event event = source.next(Deadline.afterMs(WAIT_MS));
            if (!(event instanceof Stretch stretch)) {
                return;
            }
            try {
                walk(stretch);
            } catch (KeraException error) {
                // An invalid chunk: the reader gets the error, and the bytes behind it are irrelevant.
            }
            source.giveBack(stretch);
        }
    }

    private void learn(byte[] data) throws IOException {
        JsonNode node = new ObjectMapper().readTree(data);
        wanted.add(new Wanted(BASE64.decode(node.get("schema").asText()), node.get("typed").asBoolean(),
                (StructType) DataType.fromJson(node.get("wanted").toString())));
    }

    /** The other end: sends the bytes to the next connection, and reads everything from it. */
    private static final class Peer {
        private final SynchronousQueue<byte[]> next = new SynchronousQueue<>();

        Peer(ServerSocketChannel listening) {
            Thread thread = new Thread(() -> serve(listening), "peer");
            thread.setDaemon(true);
            thread.start();
        }

        void say(byte[] data) throws IOException {
            try {
                next.put(data);
            } catch (InterruptedException error) {
                throw new IOException(error);
            }
        }

        private void serve(ServerSocketChannel listening) {
            ByteBuffer heard = ByteBuffer.allocate(1 << 16);
            while (true) {
                try {
                    byte[] data = next.take();
                    try (SocketChannel channel = listening.accept()) {
                        channel.write(ByteBuffer.wrap(data));
                        channel.shutdownOutput();
                        while (channel.read(heard.clear()) >= 0) {
                            continue;
                        }
                    }
                } catch (IOException error) {
                    // The decoder has closed the connection before it had read everything.
                } catch (InterruptedException error) {
                    return;
                }
            }
        }
    }
}
