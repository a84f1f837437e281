package kera.wire;

import java.nio.ByteBuffer;

/**
 * Whole chunks of an entry that follow each other, in memory: in {@code slot} of a broker's arena, or, where that is
 * null, copies.
 *
 * @param bytes direct, little-endian, from 0 to its limit
 */
record Stretch(ByteBuffer bytes, Position start, Position next, Arena arena, int slot, long generation)
        implements Source.Event {

    /** Whether the bytes are still what they were when they came. To be asked after they were looked at. */
    boolean intact() {
        return arena == null || arena.generation(slot) == generation;
    }
}
