package kera.columns;

/**
 * A field of a lean payload with its buffers, which lie within the body.
 *
 * @param count how many values it has
 * @param form how its values are written, or where they are
 * @param validityAt where its bits are; {@link #NOWHERE}: no value is null
 * @param packedAt where its offsets, lengths or deltas are
 * @param dataAt where its values are, or the bytes of all of them
 * @param dataBytes how many bytes these are
 * @param total bytes or values of all together, or bytes of a delta
 * @param inline the one value, or the least one
 */
record LeanNode(int count, Form form, long validityAt, long packedAt, long dataAt, long dataBytes, long total,
        byte[] inline) {
    static final long NOWHERE = -1;
    private static final byte[] NOTHING = {};

    /** Values are NULLS, PLAIN, ONE or DELTAS; where they are is said by NULLS, OFFSETS, SAME or LENGTHS. */
    enum Form { NULLS, PLAIN, ONE, DELTAS, OFFSETS, SAME, LENGTHS_1, LENGTHS_2 }

    static LeanNode nulls(int count) {
        return new LeanNode(count, Form.NULLS, NOWHERE, 0, 0, 0, 0, NOTHING);
    }

    static LeanNode plain(int count, long validityAt, long dataAt, long dataBytes) {
        return new LeanNode(count, Form.PLAIN, validityAt, 0, dataAt, dataBytes, 0, NOTHING);
    }

    static LeanNode one(int count, long validityAt, byte[] value) {
        return new LeanNode(count, Form.ONE, validityAt, 0, 0, 0, 0, value);
    }

    static LeanNode deltas(int count, long validityAt, long packedAt, int width, byte[] least) {
        return new LeanNode(count, Form.DELTAS, validityAt, packedAt, 0, 0, width, least);
    }

    static LeanNode places(int count, Form form, long validityAt, long packedAt, long dataAt, long dataBytes,
            long total) {
        return new LeanNode(count, form, validityAt, packedAt, dataAt, dataBytes, total, NOTHING);
    }
}
