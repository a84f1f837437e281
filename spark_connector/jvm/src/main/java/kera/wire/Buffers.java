package kera.wire;

import java.nio.ByteBuffer;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.Iterator;

/**
 * A pool of direct buffers: memory outside of the heap is freed only when the garbage collector finds it unused, and
 * there are many pieces. At most {@link #IDLE_BYTES_MAX} are kept while unused.
 */
final class Buffers {

    private static final long IDLE_BYTES_MAX = 64 << 20;
    private static final int BYTES_MIN = 64 << 10;
    private static final int ALIGNMENT_BYTES = 64;
    private static final Deque<ByteBuffer> IDLE = new ArrayDeque<>();
    private static long idleBytes;

    private Buffers() {
    }

    /** A buffer of at least {@code bytes} bytes, 64-byte aligned. */
    static ByteBuffer take(int bytes) {
        synchronized (IDLE) {
            for (Iterator<ByteBuffer> each = IDLE.iterator(); each.hasNext();) {
                ByteBuffer buffer = each.next();
                if (buffer.capacity() >= bytes) {
                    each.remove();
                    idleBytes -= buffer.capacity();
                    return buffer.clear();
                }
            }
        }
        int capacity = Math.max(BYTES_MIN, -ALIGNMENT_BYTES & bytes + ALIGNMENT_BYTES - 1);
        return ByteBuffer.allocateDirect(capacity + ALIGNMENT_BYTES).alignedSlice(ALIGNMENT_BYTES);
    }

    /** Give back a buffer that is no longer used. */
    static void give(ByteBuffer buffer) {
        synchronized (IDLE) {
            if (idleBytes + buffer.capacity() <= IDLE_BYTES_MAX) {
                IDLE.addFirst(buffer);
                idleBytes += buffer.capacity();
            }
        }
    }
}
