package kera.wire;

import java.io.IOException;

/** A broker refuses the client's identity, and says why. */
final class Refused extends IOException {
    private static final long serialVersionUID = 1L;

    private final transient Wire.Failure failure;

    Refused(Wire.Failure failure) {
        super(failure.message());
        this.failure = failure;
    }

    /** The failure to report to the service for an {@code error} that ended or prevented a connection. */
    static Wire.Failure failureOf(IOException error) {
        return error instanceof Refused refused ? refused.failure
                : Wire.Failure.unavailable(String.valueOf(error.getMessage()));
    }
}
