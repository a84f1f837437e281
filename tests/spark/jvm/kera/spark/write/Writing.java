package kera.spark.write;

import java.util.Base64;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import kera.spark.service.Service;
import kera.tests.Obedient;
import kera.wire.ChunkSender;
import kera.wire.Token;
import kera.wire.WriteTarget;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.util.ArrayBasedMapData;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.catalyst.util.GenericArrayData;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.IntegerType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/** Controls writers by lines of JSON. */
final class Writing extends Obedient {
    private StructType columns;
    private KeraDataWriter writer;

    public static void main(String[] arguments) throws Exception {
        serve(Writing::new);
    }

    @Override
    protected void obey(JsonNode command, ObjectNode answer) throws Exception {
        switch (command.get("op").asText()) {
            case "open" -> open(command);
            case "write" -> write(command);
            case "commit" -> commit(answer);
            case "abort" -> writer.abort();
            case "threads" -> answer.put("threads", Thread.activeCount());
            case "due" -> answer.put("due", Thread.getAllStackTraces().keySet().stream()
                    .filter(thread -> thread.getName().equals("kera-due-chunks")).count());
            default -> throw new IllegalArgumentException(command.toString());
        }
    }

    private void open(JsonNode command) {
        columns = StructType.fromDDL(command.get("columns").asText());
        JsonNode given = command.get("target");
        WriteTarget target = WriteTarget.parse(given.toString(), Token.parse(given.path("token")));
        String python = command.get("python").asText();
        Filling filling = target.latencyTargetMs() > 0 ? new Filling(target.latencyTargetMs()) : null;
        ChunkSender sender = new ChunkSender(target, command.get("producer_id").asLong(),
                command.get("producer_epoch").asInt(), () -> Service.shared(python),
                filling == null ? nanos -> { } : filling::stored);
        RowGatherer gatherer = new RowGatherer(columns, target, command.get("keyless").asInt());
        writer = new KeraDataWriter(target, gatherer, sender, filling);
    }

    /** Writes all given rows, and repeats that {@code times} times. */
    private void write(JsonNode command) throws Exception {
        for (int time = 0; time < command.path("times").asInt(1); time++) {
            for (JsonNode row : command.get("rows")) {
                writer.write((InternalRow) value(row, columns));
            }
        }
    }

    private void commit(ObjectNode answer) throws Exception {
        KeraWritten written = writer.commit();
        writer.close();
        answer.put("appended", written.appended()).put("found", written.found()).put("surplus", written.surplus());
    }

    /** Spark's form of a value: bytes are given in base64, structs and maps as lists. */
    private static Object value(JsonNode given, DataType type) {
        if (given.isNull()) {
            return null;
        }
        if (type instanceof BinaryType) {
            return Base64.getDecoder().decode(given.asText());
        }
        if (type instanceof StringType) {
            return UTF8String.fromBytes(Base64.getDecoder().decode(given.asText()));
        }
        if (type instanceof IntegerType) {
            return given.asInt();
        }
        if (type instanceof ArrayType array) {
            return values(given, array.elementType());
        }
        if (type instanceof MapType map) {
            return new ArrayBasedMapData(
                    values(given.get(0), map.keyType()), values(given.get(1), map.valueType()));
        }
        if (type instanceof StructType struct) {
            Object[] fields = new Object[struct.size()];
            for (int field = 0; field < fields.length; field++) {
                fields[field] = value(given.get(field), struct.apply(field).dataType());
            }
            return new GenericInternalRow(fields);
        }
        return given.asLong();
    }

    private static ArrayData values(JsonNode given, DataType type) {
        Object[] values = new Object[given.size()];
        for (int each = 0; each < values.length; each++) {
            values[each] = value(given.get(each), type);
        }
        return new GenericArrayData(values);
    }
}
