package kera.tests;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.function.Supplier;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;

/** An object that obeys lines of JSON on standard input in its own thread, and answers on standard output. */
public abstract class Obedient {
    protected static final ObjectMapper JSON = new ObjectMapper();
    private static PrintStream answers;

    private final ExecutorService thread = Executors.newSingleThreadExecutor(run -> {
        Thread made = new Thread(run);
        made.setDaemon(true);
        return made;
    });
    private volatile boolean busy;

    /** Carry out a command, and put its result into the answer. */
    protected abstract void obey(JsonNode command, ObjectNode answer) throws Exception;

    /** Make an object for each name in the lines, and serve until the input ends. */
    protected static void serve(Supplier<? extends Obedient> make) throws IOException {
        Map<String, Obedient> made = new ConcurrentHashMap<>();
        answers = System.out;
        System.setOut(System.err); // loggers write to System.out
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode command = JSON.readTree(line);
            Obedient of = made.computeIfAbsent(command.get("of").asText(), name -> make.get());
            if (command.get("op").asText().equals("interrupt")) {
                while (!of.busy) { // only a running command can be interrupted
                    Thread.onSpinWait();
                }
                of.thread.shutdownNow();
                answer(JSON.createObjectNode().set("id", command.get("id")));
            } else {
                of.thread.submit(() -> of.run(command));
            }
        }
    }

    private void run(JsonNode command) {
        ObjectNode answer = JSON.createObjectNode();
        answer.set("id", command.get("id"));
        busy = true;
        try {
            obey(command, answer);
        } catch (Throwable error) {
            answer.put("error", error.getClass().getSimpleName() + ": " + error.getMessage());
        }
        busy = false;
        answer(answer);
    }

    private static void answer(JsonNode answer) {
        synchronized (answers) {
            answers.println(answer);
            answers.flush();
        }
    }
}
