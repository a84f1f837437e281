package kera.spark.service;

import java.util.concurrent.ConcurrentHashMap;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import kera.wire.Planner;
import org.apache.spark.SparkEnv;

/**
 * The planner as a Python program, of which there is one process per JVM and Python.
 *
 * <p>It is started by the first call. When its process has ended, the next call starts another one.
 */
public final class Service implements Planner {
    private static final String PYTHON = "spark.kera.python";
    private static final ConcurrentHashMap<String, Service> SHARED = new ConcurrentHashMap<>();

    private final String python;
    private ServiceProcess process;

    private Service(String python) {
        this.python = python;
    }

    /** The service that {@code python} runs, the same for everybody in this JVM. */
    public static Service shared(String python) {
        return SHARED.computeIfAbsent(python, Service::new);
    }

    /** The Python of the driver: what the configuration says, or the one that Spark plans Python data sources with. */
    public static String driverPython() {
        String sparks = environment("PYSPARK_DRIVER_PYTHON", environment("PYSPARK_PYTHON", "python3"));
        return SparkEnv.get().conf().get(PYTHON, sparks);
    }

    /** The Python of an executor: its own, or else what the driver has. */
    public static String executorPython(String driverPython) {
        return environment("PYSPARK_PYTHON", driverPython);
    }

    private static String environment(String name, String otherwise) {
        String value = System.getenv(name);
        return value == null || value.isBlank() ? otherwise : value;
    }

    /**
     * The result of a call. Throws {@link kera.wire.KeraException} for what the service answers with an error, and
     * InterruptedException where the thread is interrupted. A call whose process ends is made once more, to a new one:
     * to be asked twice does no harm.
     */
    @Override
    public JsonNode call(String method, ObjectNode params) {
        try {
            return process().call(method, params);
        } catch (ServiceProcess.Ended ended) {
            return process().call(method, params);
        }
    }

    /** The process that answers now; started where there is none. For those who must know when it is another one. */
    public synchronized ServiceProcess process() {
        if (process == null || process.hasEnded()) {
            process = ServiceProcess.start(python);
        }
        return process;
    }
}
