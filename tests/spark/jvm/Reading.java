package kera.spark;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.zip.CRC32C;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.arrow.memory.util.MemoryUtil;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** Has readers do what lines of JSON on standard input say, each in a thread of its own; answers on standard output. */
final class Reading {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final Map<String, Reading> READERS = new ConcurrentHashMap<>();
    private static PrintStream answers;

    private final ExecutorService thread = Executors.newSingleThreadExecutor(run -> {
        Thread made = new Thread(run);
        made.setDaemon(true);
        return made;
    });
    private PieceReader reader;
    private KeraRealTimeReader rows;
    private KeraColumnarReader batches;
    private Chunk last;
    private volatile boolean reading;

    private Reading() {
    }

    public static void main(String[] arguments) throws Exception {
        answers = System.out;
        System.setOut(System.err); // loggers write there
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode command = JSON.readTree(line);
            Reading of = READERS.computeIfAbsent(command.get("of").asText(), name -> new Reading());
            if (command.get("op").asText().equals("interrupt")) {
                while (!of.reading) { // what has not begun could not be interrupted
                    Thread.onSpinWait();
                }
                of.thread.shutdownNow();
                answer(JSON.createObjectNode().set("id", command.get("id")));
            } else {
                of.thread.submit(() -> of.obey(command));
            }
        }
    }

    private void obey(JsonNode command) {
        ObjectNode answer = JSON.createObjectNode();
        answer.set("id", command.get("id"));
        try {
            switch (command.get("op").asText()) {
                case "open" -> open(command);
                case "next" -> next(command, answer);
                case "again" -> reader.again(last);
                case "open_rows" -> openRows(command);
                case "row" -> row(command, answer);
                case "open_batches" -> openBatches(command);
                case "batch" -> batch(answer);
                case "intact" -> answer.put("intact", last.intact());
                case "close" -> close(answer);
                default -> throw new IllegalArgumentException(command.toString());
            }
        } catch (Throwable error) {
            answer.put("error", error.getClass().getSimpleName() + ": " + error.getMessage());
        }
        answer(answer);
    }

    private static void answer(JsonNode answer) {
        synchronized (answers) {
            answers.println(answer);
            answers.flush();
        }
    }

    private void open(JsonNode command) {
        String python = command.path("python").asText();
        boolean payloadWanted = command.path("payload_wanted").asBoolean(true);
        reader = new PieceReader(
                Piece.parse(command.get("piece").toString()), () -> Service.shared(python), payloadWanted);
    }

    /** In real-time mode; of each row there is its ordinal. */
    private void openRows(JsonNode command) {
        StructType wanted = new StructType().add("offset", DataTypes.LongType);
        Piece piece = Piece.parse(command.get("piece").toString());
        rows = new KeraRealTimeReader(piece, UnsafeProjection.create(wanted),
                new KeraColumnarReader(piece, wanted, () -> Service.shared("")));
    }

    private void row(JsonNode command, ObjectNode answer) throws Exception {
        boolean there = rows.nextWithTimeout(command.get("within").asLong()).hasRecord();
        answer.put("offset", there ? rows.get().getLong(0) : -1);
        answer.put("place", rows.getOffset().toString());
    }

    private void openBatches(JsonNode command) {
        StructType wanted =
                new StructType().add("offset", DataTypes.LongType).add("value", DataTypes.BinaryType);
        Piece piece = Piece.parse(command.get("piece").toString());
        batches = new KeraColumnarReader(piece, wanted, () -> Service.shared(""));
    }

    /** The rows of the next batch, by ordinals and values; none behind the last one. */
    private void batch(ObjectNode answer) throws Exception {
        ArrayNode rows = answer.putArray("rows");
        if (!batches.next()) {
            batches.close();
            return;
        }
        ColumnarBatch batch = batches.get();
        for (int row = 0; row < batch.numRows(); row++) {
            String value = new String(batch.column(1).getBinary(row), StandardCharsets.UTF_8);
            rows.addArray().add(batch.column(0).getLong(row)).add(value);
        }
    }

    /** At most {@code count} chunks; fewer where there are no more, or none within {@code within} ms. */
    private void next(JsonNode command, ObjectNode answer) throws Exception {
        reading = true;
        ArrayNode chunks = answer.putArray("chunks");
        while (chunks.size() < command.path("count").asInt(Integer.MAX_VALUE)) {
            last = command.has("within") ? reader.nextWithin(command.get("within").asLong()) : reader.next();
            if (last == null) {
                break;
            }
            chunks.add(told(last));
        }
        reading = false;
        answer.put("ended", reader.ended());
    }

    private static ObjectNode told(Chunk chunk) {
        byte[] payload = new byte[chunk.payloadBytes];
        chunk.memory.get(Chunk.HEADER_BYTES, payload);
        for (int at = 0; at < payload.length; at++) {
            if (payload[at] != MemoryUtil.getByte(chunk.payloadAddress + at)) {
                throw new AssertionError("the payload is not at its address");
            }
        }
        CRC32C crc = new CRC32C();
        crc.update(payload);
        crc.update(ByteBuffer.allocate(chunk.chunkBytes() - Chunk.HEADER_BYTES - payload.length)); // the padding
        ObjectNode node = JSON.createObjectNode();
        node.set("start", chunk.start.toJson());
        node.set("next", chunk.next.toJson());
        return node.put("first_record", chunk.firstRecord).put("records", chunk.recordCount)
                .put("bytes", chunk.chunkBytes()).put("crc", crc.getValue()).put("in_place", chunk.inPlace)
                .put("intact", chunk.intact());
    }

    private void close(ObjectNode answer) {
        reader.close();
        Counters counters = reader.counters();
        answer.put("chunks", counters.chunks).put("in_place", counters.bytesInPlace)
                .put("pulled", counters.bytesPulled).put("routes", counters.routes);
        answer.set("losses", JSON.valueToTree(reader.losses()));
    }
}
