package kera.wire;

import java.nio.ByteBuffer;

/**
 * Whole consecutive chunks of an entry, in {@code slot} of a broker's arena, or copies if {@code arena} is null.
 *
 * @param bytes a direct, little-endian buffer, from 0 to its limit
 */
record Stretch(ByteBuffer bytes, Position start, Position next, Arena arena, int slot, long generation)
        implements Source.Event {

    /** Whether the bytes have not changed since they arrived. To be called after they were read. */
    boolean intact() {
        return arena == null || arena.generation(slot) == generation;
    }
}
