package kera.spark.service;

import java.io.BufferedReader;
import java.io.File;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicLong;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import kera.wire.KeraException;
import kera.wire.Planner;
import org.apache.spark.api.python.PythonUtils;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * One process of the {@link Service}: it reads JSON lines on its standard input, and answers on its standard output, in
 * any order.
 *
 * <p>The process ends with this JVM, however that ends, because its standard input ends. Once the process has ended,
 * every call fails with {@link Ended}, including those in flight.
 */
public final class ServiceProcess {
    private static final String MODULE = "kera.spark_connector.service";
    private static final long START_TIMEOUT_MS = 60_000;
    /** Longer than Python waits for a broker that is being recovered. */
    private static final long CALL_TIMEOUT_MS = 660_000;

    private static final Logger LOG = LoggerFactory.getLogger(ServiceProcess.class);

    private final String command;
    private final Process process;
    private final OutputStream requests;
    private final AtomicLong numbers = new AtomicLong();
    private final Map<Long, CompletableFuture<JsonNode>> waiting = new ConcurrentHashMap<>();
    private volatile boolean ended;

    /** The process has ended: its state is lost, and another process can be asked. */
    public static final class Ended extends KeraException {
        private static final long serialVersionUID = 1L;

        Ended(String message) {
            super("ServiceEnded", message, true);
        }
    }

    private ServiceProcess(String command, Process process) {
        this.command = command;
        this.process = process;
        this.requests = process.getOutputStream();
    }

    /** Start a process, and check that it answers and has the jar's version. Throws {@link KeraException} if not. */
    static ServiceProcess start(String python) {
        String command = python + " -m " + MODULE;
        ProcessBuilder builder = new ProcessBuilder(python, "-m", MODULE);
        builder.redirectError(ProcessBuilder.Redirect.INHERIT);
        String sparks = PythonUtils.sparkPythonPath();
        builder.environment().merge("PYTHONPATH", sparks, (given, more) -> given + File.pathSeparator + more);
        ServiceProcess started;
        try {
            started = new ServiceProcess(command, builder.start());
        } catch (IOException error) {
            throw unavailable("cannot run `" + command + "`: " + error.getMessage());
        }
        Thread reader = new Thread(started::readAnswers, "kera-service-answers");
        reader.setDaemon(true);
        reader.start();
        boolean fits = false;
        try {
            started.requireVersion();
            fits = true;
        } finally {
            if (!fits) {
                started.process.destroy();
            }
        }
        return started;
    }

    private void requireVersion() {
        JsonNode hello;
        try {
            hello = call("hello", Planner.JSON.createObjectNode(), START_TIMEOUT_MS);
        } catch (Ended ended) {
            throw unavailable("`" + command + "` has ended at once; is kera[spark] installed for that Python?");
        }
        String version = hello.path("version").asText();
        String expected = ServiceProcess.class.getPackage().getImplementationVersion();
        if (expected != null && !expected.equals(version)) {
            throw unavailable("the jar is of kera " + expected + ", but `" + command + "` is of kera " + version);
        }
        LOG.debug("`{}` runs as process {}", command, process.pid());
    }

    private static KeraException unavailable(String message) {
        return new KeraException("ServiceUnavailable", message, false);
    }

    /** Whether the process no longer answers. */
    boolean hasEnded() {
        return ended;
    }

    /** The result of a call, see {@link Service#call}. Throws {@link Ended} if this process cannot answer it. */
    public JsonNode call(String method, ObjectNode params) {
        return call(method, params, CALL_TIMEOUT_MS);
    }

    /** The same with the given timeout. Throws {@code ServiceTimeout} if the answer takes longer. */
    public JsonNode call(String method, ObjectNode params, long timeoutMs) {
        long number = numbers.incrementAndGet();
        CompletableFuture<JsonNode> answer = new CompletableFuture<>();
        waiting.put(number, answer);
        try {
            send(number, method, params);
            JsonNode found = answer.get(timeoutMs, TimeUnit.MILLISECONDS);
            JsonNode error = found.get("error");
            if (error == null || error.isNull()) {
                return found.path("result");
            }
            throw new KeraException(
                    error.path("type").asText(), error.path("message").asText(), error.path("retriable").asBoolean());
        } catch (ExecutionException error) {
            throw new Ended("`" + command + "` has ended while it was asked for " + method);
        } catch (TimeoutException error) {
            String what = "`" + command + "` was asked for " + method + " and did not answer within ";
            throw new KeraException("ServiceTimeout", what + timeoutMs / 1000 + " s", true);
        } catch (InterruptedException interrupted) {
            throw Unchecked.thrown(interrupted); // the class tells Spark that a query or a task is being stopped
        } finally {
            waiting.remove(number);
        }
    }

    private void send(long number, String method, ObjectNode params) {
        ObjectNode request = Planner.JSON.createObjectNode().put("id", number).put("method", method);
        request.set("params", params);
        try {
            byte[] line = (Planner.JSON.writeValueAsString(request) + "\n").getBytes(StandardCharsets.UTF_8);
            synchronized (requests) {
                requests.write(line);
                requests.flush();
            }
        } catch (JsonProcessingException error) {
            throw new IllegalStateException(error);
        } catch (IOException error) {
            ended = true; // the answers may end later, and a repeated call must get another process
            throw new Ended("`" + command + "` has ended and cannot be asked for " + method);
        }
        if (ended) { // the calls may have been failed before this one was in `waiting`
            failAll();
        }
    }

    private void readAnswers() {
        try (BufferedReader lines = process.inputReader(StandardCharsets.UTF_8)) {
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                take(line);
            }
        } catch (IOException error) {
            LOG.debug("answers of `{}` end", command, error);
        } finally {
            ended = true;
            failAll();
            process.destroy(); // the process may have closed only its output
        }
    }

    private void take(String line) {
        try {
            JsonNode answer = Planner.JSON.readTree(line);
            CompletableFuture<JsonNode> asked = waiting.get(answer.path("id").asLong());
            if (asked != null) { // after a timeout or an interrupt the call no longer waits
                asked.complete(answer);
            }
        } catch (JsonProcessingException error) {
            // The line may be part of an answer and contain a token, so it is not logged.
            LOG.warn("`{}` wrote a line that is not an answer: {} characters", command, line.length());
        }
    }

    private void failAll() {
        waiting.values().forEach(answer -> answer.completeExceptionally(new IOException("the process has ended")));
    }
}
