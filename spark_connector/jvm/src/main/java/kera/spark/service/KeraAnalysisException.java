package kera.spark.service;

import java.util.function.Supplier;

import kera.wire.KeraException;
import org.apache.spark.QueryContext;
import org.apache.spark.sql.AnalysisException;

import scala.Option;
import scala.collection.immutable.Map$;

/** An error of the driver's side, so that users catch the same exception with both engines: AnalysisException. */
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

    /** What {@code call} gives; a {@link KeraException} of it is thrown as a KeraAnalysisException. */
    public static <T> T translating(Supplier<T> call) {
        try {
            return call.get();
        } catch (KeraException error) {
            throw Unchecked.thrown(new KeraAnalysisException(error));
        }
    }
}
