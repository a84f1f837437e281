package kera.wire;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;

/** The program that decides everything except how to move bytes. Questions and answers are JSON. */
public interface Planner {
    /** The JSON mapper of questions and answers. */
    ObjectMapper JSON = new ObjectMapper();

    /** The result of a call. Throws {@link KeraException} if the planner answers with an error. */
    JsonNode call(String method, ObjectNode params);
}
