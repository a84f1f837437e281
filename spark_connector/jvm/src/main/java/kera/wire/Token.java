package kera.wire;

import java.io.Serializable;

import com.fasterxml.jackson.databind.JsonNode;

/**
 * The token by which the cluster knows whose rights a task has. The driver obtains it, and it reaches tasks with their
 * other data. Printing a token, or an object that contains it, does not show the text. See
 * {@code kera.spark_connector.delegation}.
 */
public final class Token implements Serializable {
    private static final long serialVersionUID = 1L;

    private final String text;

    Token(String text) {
        this.text = text;
    }

    /** Parse the JSON form; null if it is null or missing. */
    public static Token parse(JsonNode node) {
        return node == null || node.isNull() || node.isMissingNode() ? null : new Token(node.asText());
    }

    /** The secret text: only to be sent to brokers and to the service that the token is meant for. */
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
