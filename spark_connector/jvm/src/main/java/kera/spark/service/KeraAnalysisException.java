package kera.spark.service;

import java.util.function.Supplier;

import kera.wire.KeraException;
import org.apache.spark.QueryContext;
import org.apache.spark.sql.AnalysisException;

import scala.Option;
import scala.collection.immutable.Map$;

/** An error on the driver. It is an AnalysisException, so that users catch the same exception with both engines. */
public final class KeraAnalysisException extends AnalysisException {
    private static final long serialVersionUID = 1L;

    private KeraAnalysisException(KeraException cause) {
        super(
                cause.getMessage(),
                Option.empty(),
                Option.empty(),
                Option.apply(cause),
                Option.empty(),
                Map$.MODULE$.empty(),
                new QueryContext[0]);
    }

    /** Return the result of {@code call}; rethrow its {@link KeraException} as a KeraAnalysisException. */
    public static <T> T translating(Supplier<T> call) {
        try {
            return call.get();
        } catch (KeraException error) {
            throw Unchecked.thrown(new KeraAnalysisException(error));
        }
    }
}
