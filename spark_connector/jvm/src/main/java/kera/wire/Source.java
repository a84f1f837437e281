package kera.wire;

import java.io.Closeable;
import java.io.IOException;

/** What one broker gives of a range of an entry, from a position on, in order. */
interface Source extends Closeable {

    /** What has come: chunks, or why no more of them come. */
    sealed interface Event permits Stretch, End {
    }

    /** Why no more comes this way. */
    enum Reason {
        /** All up to the end of the range has come. */
        REACHED,
        /** The entry goes on at another broker. */
        MOVED,
        /** There is an error. */
        FAILED,
        /** Readers hold too much of the broker's memory: it has to be asked for copies. */
        PULL,
        /** Copies have been asked for long enough: there may be a better way again. */
        AGAIN
    }

    /** No more comes this way; the range goes on at {@code next}. There is an error if it is FAILED. */
    record End(Reason reason, Position next, Wire.Failure error) implements Event {
    }

    /** The next that has come; null: nothing did in time. The stretch before it has been given back. */
    Event next(long deadline) throws IOException;

    /** Nothing refers to its bytes any more. */
    void giveBack(Stretch stretch);

    /** Nothing more is wanted, and every stretch was given back: what can be used again is kept for others. */
    void finish() throws IOException;

    /** Nothing more is wanted: all that is held is let go of. May be repeated. */
    @Override
    void close();
}
