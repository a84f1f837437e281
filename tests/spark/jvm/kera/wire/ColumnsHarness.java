package kera.wire;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import kera.columns.Columns;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Constructor;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.Iterator;
import java.util.List;
import java.util.Random;
import java.util.function.UnaryOperator;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.SpecializedGetters;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.catalyst.util.MapData;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.BooleanType;
import org.apache.spark.sql.types.ByteType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DateType;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.DoubleType;
import org.apache.spark.sql.types.FloatType;
import org.apache.spark.sql.types.IntegerType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.NullType;
import org.apache.spark.sql.types.ShortType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** Loads chunks with Columns for a test, by one JSON object per line, and answers with their rows. */
final class ColumnsHarness {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final int PAGE_BYTES = 4096;
    private static final int BEHIND_BYTES = 1 << 20;
    private static final int VALUES_MAX = 1 << 18;
    private static final Piece PIECE = Piece.parse("""
            {"stream": "events", "stream_id": 7, "streamlet": 3, "entry": 1, "start": [1, 0, 0], "end": null,
             "first_record": 0, "records": 0, "bytes": 0, "typed": false, "schema": "", "schema_id": 1,
             "fail_on_data_loss": true, "shared_memory": "never", "connection": {}, "broker": null, "hosts": [],
             "settings": {"fetch_bytes_max": 1, "prefetch_bytes_max": 1, "request_timeout_ms": 1,
                          "connect_timeout_ms": 1, "verify_checksums": true, "transport": "tcp",
                          "consumer_group": ""}}""", null);

    private final Path folder;

    private ColumnsHarness(Path folder) {
        this.folder = folder;
    }

    /** The only argument is a folder for files. */
    public static void main(String[] arguments) throws IOException {
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err); // loggers write to System.out
        ColumnsHarness harness = new ColumnsHarness(Path.of(arguments[0]));
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            out.println(harness.answer(JSON.readTree(line)));
        }
    }

    private ObjectNode answer(JsonNode request) {
        ObjectNode answer = JSON.createObjectNode();
        try {
            switch (request.get("method").asText()) {
                case "rows" -> rows(request, answer);
                case "flip" -> flip(request, answer);
                case "open" -> open(request, answer);
                default -> answer.put("unsupported", unsupported(request));
            }
        } catch (Throwable error) {
            answer.removeAll();
            answer.put("error", error.getMessage() == null ? error.toString() : error.getMessage());
        }
        return answer;
    }

    /** The reason why such columns cannot be read, or null. */
    private static String unsupported(JsonNode request) {
        try {
            columns(request, wanted(request)).close();
            return null;
        } catch (UnsupportedOperationException error) {
            return error.getMessage();
        }
    }

    /** The rows of each chunk; with `scribbles` its payload is overwritten that often, and rows are only read. */
    private void rows(JsonNode request, ObjectNode answer) throws IOException {
        StructType wanted = wanted(request);
        ArrayNode batches = answer.putArray("batches");
        int scribbles = request.path("scribbles").asInt();
        try (Columns columns = columns(request, wanted)) {
            for (JsonNode each : request.get("chunks")) {
                Guarded memory = new Guarded(folder, Base64.getDecoder().decode(each.get("bytes").asText()));
                Chunk chunk = memory.chunk();
                ColumnarBatch batch = columns.load(chunk, each.path("skip").asInt(), behind(each));
                for (int seed = 0; seed < scribbles; seed++) {
                    memory.scribble(chunk, seed);
                    readAnyway(batch, wanted);
                }
                if (scribbles == 0) {
                    batches.add(rows(batch, wanted));
                }
                batch.closeIfFreeable();
            }
        }
    }

    /** Loads the chunk once per bit of `flips`, with that bit flipped, and counts the outcomes. */
    private void flip(JsonNode request, ObjectNode answer) throws IOException {
        StructType wanted = wanted(request);
        byte[] whole = Base64.getDecoder().decode(request.get("chunk").asText());
        Guarded memory = new Guarded(folder, whole);
        Chunk chunk = memory.chunk();
        int corrupt = 0;
        int read = 0;
        try (Columns columns = columns(request, wanted)) {
            for (JsonNode flip : request.get("flips")) {
                int at = Chunk.HEADER_BYTES + flip.asInt() / Byte.SIZE;
                byte before = memory.bytes.get(at);
                memory.bytes.put(at, (byte) (before ^ 1 << flip.asInt() % Byte.SIZE));
                try {
                    readAnyway(columns.load(chunk, 0, behind(request)), wanted);
                    read++;
                } catch (KeraException error) {
                    if (!error.getMessage().startsWith("CorruptChunk: ")) {
                        throw error;
                    }
                    corrupt++;
                }
                memory.bytes.put(at, before);
            }
        }
        answer.put("corrupt", corrupt);
        answer.put("read", read);
    }

    /** Loads each of the chunks, reads all its values, and answers with the outcomes. */
    private void open(JsonNode request, ObjectNode answer) throws IOException {
        StructType wanted = wanted(request);
        ArrayNode outcomes = answer.putArray("outcomes");
        for (JsonNode each : request.get("chunks")) {
            Guarded memory = new Guarded(folder, Base64.getDecoder().decode(each.asText()));
            try (Columns columns = columns(request, wanted)) {
                readAnyway(columns.load(memory.chunk(), 0, behind(request)), wanted);
                outcomes.add("read");
            } catch (Throwable error) {
                outcomes.add(error.toString());
            }
        }
        System.gc(); // each chunk has its own mapping
    }

    /** A function that gives the chunks behind another one. */
    private UnaryOperator<Chunk> behind(JsonNode request) throws IOException {
        List<Chunk> chunks = new ArrayList<>();
        for (JsonNode each : request.path("behind")) {
            chunks.add(new Guarded(folder, Base64.getDecoder().decode(each.asText())).chunk());
        }
        Iterator<Chunk> left = chunks.iterator();
        return before -> left.hasNext() ? left.next() : null;
    }

    private static Columns columns(JsonNode request, StructType wanted) {
        return new Columns(bytes(request, "schema"), request.get("typed").asBoolean(), wanted,
                request.get("stream").asText(), 3, 1, null);
    }

    private static StructType wanted(JsonNode request) {
        return (StructType) DataType.fromJson(request.get("wanted").toString());
    }

    private static byte[] bytes(JsonNode request, String name) {
        return Base64.getDecoder().decode(request.get(name).asText());
    }

    private static ArrayNode rows(ColumnarBatch batch, StructType wanted) {
        ArrayNode rows = JSON.createArrayNode();
        Iterator<InternalRow> each = batch.rowIterator();
        while (each.hasNext()) {
            rows.add(fields(each.next(), wanted));
        }
        return rows;
    }

    /** A value outside its type may cause an exception; a read of foreign memory causes an Error. */
    static void readAnyway(ColumnarBatch batch, StructType wanted) {
        for (int row = 0; row < batch.numRows(); row++) {
            for (int field = 0; field < wanted.size(); field++) {
                try {
                    value(batch.getRow(row), field, wanted.fields()[field].dataType());
                } catch (RuntimeException error) {
                    if (error instanceof IndexOutOfBoundsException) {
                        throw error;
                    }
                }
            }
        }
    }

    private static ArrayNode fields(InternalRow row, StructType type) {
        ArrayNode fields = JSON.createArrayNode();
        int at = 0;
        for (StructField field : type.fields()) {
            fields.add(value(row, at++, field.dataType()));
        }
        return fields;
    }

    private static JsonNode value(SpecializedGetters row, int at, DataType type) {
        if (type instanceof NullType || row.isNullAt(at)) {
            return JSON.nullNode();
        }
        if (type instanceof ArrayType array) {
            return values(row.getArray(at), array.elementType());
        }
        if (type instanceof MapType map) {
            MapData entries = row.getMap(at);
            ArrayNode keys = values(entries.keyArray(), map.keyType());
            ArrayNode values = values(entries.valueArray(), map.valueType());
            ArrayNode pairs = JSON.createArrayNode();
            for (int index = 0; index < keys.size(); index++) {
                pairs.addArray().add(keys.get(index)).add(values.get(index));
            }
            return pairs;
        }
        if (type instanceof StructType struct) {
            return fields(row.getStruct(at, struct.size()), struct);
        }
        ArrayNode one = JSON.createArrayNode();
        if (type instanceof BooleanType) {
            one.add(row.getBoolean(at));
        } else if (type instanceof ByteType) {
            one.add(row.getByte(at));
        } else if (type instanceof ShortType) {
            one.add(row.getShort(at));
        } else if (type instanceof IntegerType || type instanceof DateType) {
            one.add(row.getInt(at));
        } else if (type instanceof FloatType) {
            one.add((double) row.getFloat(at));
        } else if (type instanceof DoubleType) {
            one.add(row.getDouble(at));
        } else if (type instanceof DecimalType decimal) {
            one.add(row.getDecimal(at, decimal.precision(), decimal.scale()).toJavaBigDecimal().toPlainString());
        } else if (type instanceof StringType) {
            one.add(row.getUTF8String(at).toString());
        } else if (type instanceof BinaryType) {
            one.add(Base64.getEncoder().encodeToString(row.getBinary(at)));
        } else { // all types of times
            one.add(row.getLong(at));
        }
        return one.get(0);
    }

    private static ArrayNode values(ArrayData array, DataType type) {
        ArrayNode values = JSON.createArrayNode();
        if (array.numElements() > VALUES_MAX) { // values without bytes, which would need bytes in JSON
            throw new IllegalStateException(array.numElements() + " values are more than are looked at");
        }
        for (int index = 0; index < array.numElements(); index++) {
            values.add(value(array, index, type));
        }
        return values;
    }

    /** Bytes at the end of a mapping, so that a read behind them is an InternalError. */
    private static final class Guarded {
        final ByteBuffer bytes;

        Guarded(Path folder, byte[] content) throws IOException {
            int room = (content.length + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
            Path file = Files.createTempFile(folder, "chunk", "");
            try (FileChannel channel = FileChannel.open(file, StandardOpenOption.READ, StandardOpenOption.WRITE)) {
                ByteBuffer all = channel.map(FileChannel.MapMode.READ_WRITE, 0, room + BEHIND_BYTES);
                channel.truncate(room);
                bytes = all.slice(room - content.length, content.length).order(ByteOrder.LITTLE_ENDIAN);
            }
            Files.delete(file);
            bytes.put(0, content);
        }

        Chunk chunk() {
            Position start = new Position(1, 0, 0);
            Stretch stretch = new Stretch(bytes, start, start, null, 0, 0);
            return Chunk.open(stretch, 0, start, PIECE, false);
        }

        void scribble(Chunk chunk, int seed) {
            byte[] garbage = new byte[chunk.payloadBytes];
            if (seed == 0) {
                Arrays.fill(garbage, (byte) 0xFF);
            } else {
                new Random(seed).nextBytes(garbage);
            }
            bytes.put(Chunk.HEADER_BYTES, garbage);
        }
    }
}
