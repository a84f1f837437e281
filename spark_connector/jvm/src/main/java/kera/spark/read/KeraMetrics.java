package kera.spark.read;

import kera.wire.PieceReader;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.metric.CustomSumMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;

/** The metrics that Spark shows of a scan. Public, because Spark creates the metrics by their class names. */
public final class KeraMetrics {
    private KeraMetrics() {}

    /** Number of chunks read. */
    public static final class Chunks extends CustomSumMetric {
        @Override
        public String name() {
            return "keraChunks";
        }

        @Override
        public String description() {
            return "chunks read";
        }
    }

    /** Bytes that were read in place, in the memory of brokers. */
    public static final class BytesInPlace extends CustomSumMetric {
        @Override
        public String name() {
            return "keraBytesInPlace";
        }

        @Override
        public String description() {
            return "bytes read in brokers' memory";
        }
    }

    /** Bytes that brokers sent. */
    public static final class BytesPulled extends CustomSumMetric {
        @Override
        public String name() {
            return "keraBytesPulled";
        }

        @Override
        public String description() {
            return "bytes sent by brokers";
        }
    }

    /** How often the planner was asked where to go on. */
    public static final class Routes extends CustomSumMetric {
        @Override
        public String name() {
            return "keraRoutes";
        }

        @Override
        public String description() {
            return "route requests";
        }
    }

    /** The value of a metric, as a task reports it. */
    private record Measured(String name, long value) implements CustomTaskMetric {}

    static CustomMetric[] all() {
        return new CustomMetric[] {new Chunks(), new BytesInPlace(), new BytesPulled(), new Routes()};
    }

    /** The values of one task so far. */
    static CustomTaskMetric[] of(PieceReader.Counters counters) {
        return new CustomTaskMetric[] {
            new Measured(new Chunks().name(), counters.chunks()),
            new Measured(new BytesInPlace().name(), counters.bytesInPlace()),
            new Measured(new BytesPulled().name(), counters.bytesPulled()),
            new Measured(new Routes().name(), counters.routes()),
        };
    }
}
