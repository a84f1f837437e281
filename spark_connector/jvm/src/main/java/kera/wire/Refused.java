package kera.wire;

import java.io.IOException;

/** A broker does not take who this is; it says why. */
final class Refused extends IOException {
    private static final long serialVersionUID = 1L;

    private final transient Wire.Failure failure;

    Refused(Wire.Failure failure) {
        super(failure.message());
        this.failure = failure;
    }

    /** What the service is to be told of an {@code error} that has ended a connection, or has kept it from being. */
    static Wire.Failure failureOf(IOException error) {
        return error instanceof Refused refused ? refused.failure
                : Wire.Failure.unavailable(String.valueOf(error.getMessage()));
    }
}
