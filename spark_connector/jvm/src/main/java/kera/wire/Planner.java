package kera.wire;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;

/** The program that decides everything that is not moving bytes. Questions and answers are JSON. */
public interface Planner {
    /** For questions and answers. */
    ObjectMapper JSON = new ObjectMapper();

    /** The result of a call. Throws {@link KeraException} for what the planner answers with an error. */
    JsonNode call(String method, ObjectNode params);
}
