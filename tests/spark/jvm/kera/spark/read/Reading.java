package kera.spark.read;

import java.nio.charset.StandardCharsets;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import kera.spark.service.Service;
import kera.tests.Obedient;
import kera.wire.Chunk;
import kera.wire.Piece;
import kera.wire.PieceReader;
import kera.wire.Token;
import kera.wire.Told;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** Controls readers by lines of JSON. */
final class Reading extends Obedient {
    private PieceReader reader;
    private KeraRealTimeReader rows;
    private KeraColumnarReader batches;
    private Chunk last;

    public static void main(String[] arguments) throws Exception {
        serve(Reading::new);
    }

    @Override
    protected void obey(JsonNode command, ObjectNode answer) throws Exception {
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
    }

    private void open(JsonNode command) {
        String python = command.path("python").asText();
        boolean payloadWanted = command.path("payload_wanted").asBoolean(true);
        reader = new PieceReader(piece(command), () -> Service.shared(python), payloadWanted);
    }

    /** Here the piece includes its token. */
    private static Piece piece(JsonNode command) {
        JsonNode piece = command.get("piece");
        return Piece.parse(piece.toString(), Token.parse(piece.path("token")));
    }

    /** Opens a reader of real-time mode, whose rows have only their ordinal. */
    private void openRows(JsonNode command) {
        StructType wanted = new StructType().add("offset", DataTypes.LongType);
        Piece piece = piece(command);
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
        Piece piece = piece(command);
        batches = new KeraColumnarReader(piece, wanted, () -> Service.shared(""));
    }

    /** The ordinals and values of the next batch's rows; empty behind the last batch. */
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

    /** Reads at most {@code count} chunks, up to the end or a pause of {@code within} ms. */
    private void next(JsonNode command, ObjectNode answer) throws Exception {
        ArrayNode chunks = answer.putArray("chunks");
        while (chunks.size() < command.path("count").asInt(Integer.MAX_VALUE)) {
            last = command.has("within") ? reader.nextWithin(command.get("within").asLong()) : reader.next();
            if (last == null) {
                break;
            }
            chunks.add(Told.of(last));
        }
        answer.put("ended", Told.hasEnded(reader));
    }

    private void close(ObjectNode answer) {
        reader.close();
        PieceReader.Counters counters = reader.counters();
        answer.put("chunks", counters.chunks()).put("in_place", counters.bytesInPlace())
                .put("pulled", counters.bytesPulled()).put("routes", counters.routes());
        answer.set("losses", JSON.valueToTree(reader.losses()));
    }
}
