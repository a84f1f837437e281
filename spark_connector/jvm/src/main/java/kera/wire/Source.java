package kera.wire;

import java.io.Closeable;
import java.io.IOException;

/** Reads a range of an entry from one broker, in order, from a position on. */
interface Source extends Closeable {

    /** What has arrived: chunks, or the end of the source. */
    sealed interface Event permits Stretch, End {
    }

    /** The reason why a source has ended. */
    enum Reason {
        /** The whole range has arrived. */
        REACHED,
        /** The entry continues at another broker. */
        MOVED,
        /** An error occurred. */
        FAILED,
        /** Readers hold too much of the broker's memory: copies have to be requested. */
        PULL,
        /** Copies have been requested for long enough: pushing may be possible again. */
        AGAIN
    }

    /** The end of the source; the range continues at {@code next}. There is an error if the reason is FAILED. */
    record End(Reason reason, Position next, Wire.Failure error) implements Event {
    }

    /** The next event; null if none arrives in time. The caller has given back the stretch before it. */
    Event next(long deadline) throws IOException;

    /** Give back a stretch whose bytes are not used any more. */
    void giveBack(Stretch stretch);

    /** End after every stretch was given back: keep the connection for others if it can be reused, or close it. */
    void finish() throws IOException;

    /** End and release everything. May be called repeatedly. */
    @Override
    void close();
}
