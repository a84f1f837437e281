package kera.spark.service;

/** Throws checked exceptions through interfaces of Spark that do not declare them: Scala knows no such difference. */
final class Unchecked {
    private Unchecked() {}

    /** Throws {@code error} as it is. It returns nothing: the type lets callers write {@code throw thrown(error)}. */
    static RuntimeException thrown(Throwable error) {
        return Unchecked.<RuntimeException>as(error);
    }

    @SuppressWarnings("unchecked")
    private static <E extends Throwable> RuntimeException as(Throwable error) throws E {
        throw (E) error;
    }
}
