package kera.spark.service;

/** Throws checked exceptions through Spark interfaces that do not declare them: Scala has no checked exceptions. */
final class Unchecked {
    private Unchecked() {}

    /** Throws {@code error} unchanged. It never returns: the type lets callers write {@code throw thrown(error)}. */
    static RuntimeException thrown(Throwable error) {
        return Unchecked.<RuntimeException>as(error);
    }

    @SuppressWarnings("unchecked")
    private static <E extends Throwable> RuntimeException as(Throwable error) throws E {
        throw (E) error;
    }
}
