package kera.wire;

/** An error with the type and the text that it has in Python; its message is {@code type: message}. */
public class KeraException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    private final boolean retriable;

    /**
     * @param type name of the error's Python class
     * @param message description of the error, without the type
     * @param retriable whether the same call may succeed later
     */
    public KeraException(String type, String message, boolean retriable) {
        super(type + ": " + message);
        this.retriable = retriable;
    }

    /** Whether the same call may succeed later. */
    public boolean retriable() {
        return retriable;
    }
}
