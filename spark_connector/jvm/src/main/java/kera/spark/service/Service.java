package kera.spark.service;

import java.util.concurrent.ConcurrentHashMap;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import kera.wire.Planner;
import org.apache.spark.SparkEnv;

/**
 * The planner as a Python program, with one process per JVM and Python.
 *
 * <p>The first call starts the process. If the process has ended, the next call starts another one.
 */
public final class Service implements Planner {
    private static final String PYTHON = "spark.kera.python";
    private static final ConcurrentHashMap<String, Service> SHARED = new ConcurrentHashMap<>();

    private final String python;
    private ServiceProcess process;

    private Service(String python) {
        this.python = python;
    }

    /** The service that {@code python} runs, which the whole JVM shares. */
    public static Service shared(String python) {
        return SHARED.computeIfAbsent(python, Service::new);
    }

    /** The Python of the driver: the configured one, or the one with which Spark plans Python data sources. */
    public static String driverPython() {
        String sparks = environment("PYSPARK_DRIVER_PYTHON", environment("PYSPARK_PYTHON", "python3"));
        return SparkEnv.get().conf().get(PYTHON, sparks);
    }

    /** The Python of an executor: its own, or else the driver's. */
    public static String executorPython(String driverPython) {
        return environment("PYSPARK_PYTHON", driverPython);
    }

    private static String environment(String name, String otherwise) {
        String value = System.getenv(name);
        return value == null || value.isBlank() ? otherwise : value;
    }

    /**
     * The result of a call. Throws {@link kera.wire.KeraException} if the service answers with an error, and
     * InterruptedException if the thread is interrupted. If the process ends during a call, the call is repeated once
     * with a new process: repeating a call does no harm.
     */
    @Override
    public JsonNode call(String method, ObjectNode params) {
        try {
            return process().call(method, params);
        } catch (ServiceProcess.Ended ended) {
            return process().call(method, params);
        }
    }

    /** The current process, started if there is none. For callers that must know when the process has changed. */
    public synchronized ServiceProcess process() {
        if (process == null || process.hasEnded()) {
            process = ServiceProcess.start(python);
        }
        return process;
    }
}
