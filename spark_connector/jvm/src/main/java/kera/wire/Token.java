package kera.wire;

import java.io.Serializable;

import com.fasterxml.jackson.databind.JsonNode;

/**
 * What shows the cluster whose rights a task has: the driver has got it, and it comes with what tasks are made from.
 * Who prints it, or what it is in, does not see it. See {@code kera.spark_connector.delegation}.
 */
public final class Token implements Serializable {
    private static final long serialVersionUID = 1L;

    private final String text;

    Token(String text) {
        this.text = text;
    }

    /** Null of null, or of nothing. */
    public static Token parse(JsonNode node) {
        return node == null || node.isNull() || node.isMissingNode() ? null : new Token(node.asText());
    }

    /** For whom it is to be shown to, and for nobody else. */
    String text() {
        return text;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof Token token && token.text.equals(text);
    }

    @Override
    public int hashCode() {
        return text.hashCode();
    }

    @Override
    public String toString() {
        return "Token()";
    }
}
