package kera.spark;

/** What a reader has done so far. Its own thread counts and looks. */
final class Counters {
    long chunks;
    /** Of chunks that were read where they lie in a broker's memory. */
    long bytesInPlace;
    /** Of chunks that came as copies. */
    long bytesPulled;
    /** How often the service was asked where to go on. */
    long routes;
}
