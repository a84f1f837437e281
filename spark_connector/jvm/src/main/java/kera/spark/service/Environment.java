package kera.spark.service;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.List;
import java.util.Optional;

import kera.wire.KeraException;
import org.apache.arrow.memory.util.MemoryUtil;
import org.apache.spark.package$;

/** Checks whether a JVM has what the columnar engine needs, and names what is missing. */
public final class Environment {
    /** Prefixes of the Spark versions that the engine is compiled against and tested with; the same as in engine.py. */
    private static final List<String> VERSIONS = List.of("4.3.");

    private Environment() {}

    /**
     * Returns the requirement that the driver does not meet, if any. Starts the planner, which takes a second the first
     * time. Throws {@link KeraException} if the planner did not start in time; the next call tries again.
     */
    public static Optional<String> missing(String python) {
        return missingVersion(package$.MODULE$.SPARK_VERSION()).or(Environment::missingForReading)
                .or(() -> missingPlanner(python));
    }

    /** The engine uses internal classes of Spark: with an untested version it may read wrong values. */
    static Optional<String> missingVersion(String version) {
        return VERSIONS.stream().anyMatch(version::startsWith) ? Optional.empty()
                : Optional.of("it is made for Spark 4.3, and this is " + version);
    }

    /** What this JVM lacks for reading chunks; executors need only this. */
    public static Optional<String> missingForReading() {
        if (ByteOrder.nativeOrder() != ByteOrder.LITTLE_ENDIAN) {
            return Optional.of("a little-endian processor");
        }
        try {
            // The name alone would not load the class; and without java.nio its initialization fails.
            Class<?> arrow = Class.forName(MemoryUtil.class.getName());
            if (ByteBuffer.class.getModule().isOpen("java.nio", arrow.getModule())) {
                return Optional.empty();
            }
        } catch (ClassNotFoundException | LinkageError error) {
            // the reason is returned below
        }
        return Optional.of("java.nio is closed to Arrow: start this JVM with"
                + " --add-opens=java.base/java.nio=ALL-UNNAMED (spark.driver.extraJavaOptions,"
                + " spark.executor.extraJavaOptions)");
    }

    private static Optional<String> missingPlanner(String python) {
        try {
            Service.shared(python).process();
            return Optional.empty();
        } catch (KeraException error) {
            if (error.retriable()) {
                throw error; // the planner was too slow this time
            }
            return Optional.of(error.getMessage());
        }
    }
}
