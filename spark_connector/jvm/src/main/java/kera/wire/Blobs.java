package kera.wire;

import java.util.Arrays;

import com.fasterxml.jackson.databind.JsonNode;

/** A growing list of byte strings, stored one after the other; some may be null. */
public final class Blobs {

    public static final int NULL = -1;

    private byte[] bytes = new byte[1 << 10];
    private int[] lengths = new int[1 << 6];
    private int size;
    private int count;
    private int nulls;

    /** Parse the JSON form, see {@code rows_as_json} of {@code service/writes.py}. */
    static Blobs parse(JsonNode node) {
        Blobs made = new Blobs();
        made.bytes = Numbers.bytes(node.get("bytes"));
        made.size = made.bytes.length;
        made.lengths = Numbers.ints(node.get("lengths"));
        made.count = made.lengths.length;
        for (int length : made.lengths) {
            made.nulls += length == NULL ? 1 : 0;
        }
        return made;
    }

    /** Add a value: {@code length} bytes of {@code from}, starting at {@code at}. */
    public void add(byte[] from, int at, int length) {
        int place = add(length);
        System.arraycopy(from, at, bytes, place, length);
    }

    /** Add a value of {@code length} bytes, which the caller puts into {@link #bytes()} at the returned place. */
    public int add(int length) {
        grow(length);
        lengths[count++] = length;
        size += length;
        return size - length;
    }

    public void addNull() {
        grow(0);
        lengths[count++] = NULL;
        nulls++;
    }

    private void grow(int more) {
        if (bytes.length - size < more) {
            bytes = Arrays.copyOf(bytes, Math.max(Math.addExact(size, more), 2 * bytes.length));
        }
        if (count == lengths.length) {
            lengths = Arrays.copyOf(lengths, Math.max(1 << 6, 2 * count));
        }
    }

    void clear() {
        size = 0;
        count = 0;
        nulls = 0;
    }

    int count() {
        return count;
    }

    int nulls() {
        return nulls;
    }

    /** The number of bytes of all values together. */
    int size() {
        return size;
    }

    public byte[] bytes() {
        return bytes;
    }

    /** The length of each value; {@link #NULL} for a null. */
    int[] lengths() {
        return lengths;
    }
}
