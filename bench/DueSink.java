import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteOrder;
import java.nio.LongBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Instant;
import java.time.temporal.ChronoUnit;

import org.apache.spark.sql.ForeachWriter;
import org.apache.spark.sql.Row;

/**
 * The sink of spark_real_time.py: when each row was due, which it says, and when it came, in microseconds of the clock.
 *
 * <p>Each task of a micro-batch has a file of its own, {@code EPOCH-PARTITION}, which it maps, so that whoever waits
 * for rows sees them at once: when the task has opened it, when it has closed it, then a pair for each row.
 */
public final class DueSink extends ForeachWriter<Row> {
    private static final long serialVersionUID = 1;
    private static final int HEAD = 2;

    private final String folder;
    private final int rowsMax;
    private transient LongBuffer longs;

    public DueSink(String folder, int rowsMax) {
        this.folder = folder;
        this.rowsMax = rowsMax;
    }

    @Override
    public boolean open(long partition, long epoch) {
        Path path = Path.of(folder, epoch + "-" + partition);
        try (FileChannel file = FileChannel.open(
                path, StandardOpenOption.CREATE, StandardOpenOption.READ, StandardOpenOption.WRITE)) {
            longs = file.map(FileChannel.MapMode.READ_WRITE, 0, (HEAD + 2L * rowsMax) * Long.BYTES)
                    .order(ByteOrder.nativeOrder())
                    .asLongBuffer();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        longs.put(0, nowUs());
        longs.position(HEAD);
        return true;
    }

    @Override
    public void process(Row row) {
        longs.put(row.getLong(0));
        longs.put(nowUs());
    }

    @Override
    public void close(Throwable error) {
        longs.put(1, nowUs());
    }

    private static long nowUs() {
        return ChronoUnit.MICROS.between(Instant.EPOCH, Instant.now());
    }
}
