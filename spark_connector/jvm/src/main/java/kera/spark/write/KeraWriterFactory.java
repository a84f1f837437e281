package kera.spark.write;

import kera.spark.service.Environment;
import kera.spark.service.Service;
import kera.wire.ChunkSender;
import kera.wire.KeraException;
import kera.wire.Token;
import kera.wire.WriteTarget;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.streaming.StreamingDataWriterFactory;
import org.apache.spark.sql.types.StructType;

/** Makes the writers of tasks; Spark sends it to the executors. */
final class KeraWriterFactory implements DataWriterFactory, StreamingDataWriterFactory {
    private static final long serialVersionUID = 1L;

    private final StructType given;
    private final String target;
    private final Token token;
    private final long[] producerIds;
    private final long version;
    private final String driverPython;

    /**
     * {@code target} is the JSON of a {@link WriteTarget}, {@code token} the token to authenticate with, or null;
     * {@code producerIds} has one id per partition; {@code version} is used for batches only.
     */
    KeraWriterFactory(StructType given, String target, Token token, long[] producerIds, long version,
            String driverPython) {
        this.given = given;
        this.target = target;
        this.token = token;
        this.producerIds = producerIds;
        this.version = version;
        this.driverPython = driverPython;
    }

    @Override
    public DataWriter<InternalRow> createWriter(int partitionId, long taskId) {
        return writer(partitionId, version);
    }

    @Override
    public DataWriter<InternalRow> createWriter(int partitionId, long taskId, long epochId) {
        return writer(partitionId, epochId);
    }

    /** Make a writer under the name that {@code task_name} of {@code writing/writers.py} gives it. */
    private DataWriter<InternalRow> writer(int partitionId, long number) {
        Environment.missingForReading().ifPresent(missing -> {
            throw new KeraException("EngineUnavailable", missing, false);
        });
        WriteTarget known = WriteTarget.parse(target, token);
        int keyless = (int) ((partitionId + number) % known.streamlets());
        Filling filling = known.latencyTargetMs() > 0 ? new Filling(known.latencyTargetMs()) : null;
        ChunkSender sender = new ChunkSender(known, producerIds[partitionId], (int) (number + 1),
                () -> Service.shared(Service.executorPython(driverPython)),
                filling == null ? nanos -> { } : filling::stored);
        return new KeraDataWriter(known, new RowGatherer(given, known, keyless), sender, filling);
    }
}
