package kera.columns;

/**
 * A field of a lean payload, and the places of its buffers in the body.
 *
 * @param count number of values
 * @param form encoding of the values, or of their places
 * @param validityAt place of the validity bits; {@link #NOWHERE} if no value is null
 * @param packedAt place of the offsets, lengths or deltas
 * @param dataAt place of the values, or of their bytes
 * @param dataBytes number of bytes at {@code dataAt}
 * @param total number of bytes or values of all together, or bytes per delta
 * @param inline the single value, or the least value
 */
record LeanNode(int count, Form form, long validityAt, long packedAt, long dataAt, long dataBytes, long total,
        byte[] inline) {
    static final long NOWHERE = -1;
    private static final byte[] NOTHING = {};

    /** NULLS, PLAIN, ONE and DELTAS encode values; NULLS, OFFSETS, SAME and LENGTHS encode their places. */
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
