package kera.wire;

import java.nio.ByteBuffer;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.Iterator;

/**
 * Direct buffers for what is pulled, which are used again: memory outside of the heap is only free when the garbage
 * collector finds that it is, and pieces are many. At most {@link #IDLE_BYTES_MAX} are kept while nobody uses them.
 */
final class Buffers {

    private static final long IDLE_BYTES_MAX = 64 << 20;
    private static final int BYTES_MIN = 64 << 10;
    private static final int ALIGNMENT_BYTES = 64;
    private static final Deque<ByteBuffer> IDLE = new ArrayDeque<>();
    private static long idleBytes;

    private Buffers() {
    }

    /** One of at least so many bytes, 64-byte aligned. */
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

    /** Nobody looks at it any more. */
    static void give(ByteBuffer buffer) {
        synchronized (IDLE) {
            if (idleBytes + buffer.capacity() <= IDLE_BYTES_MAX) {
                IDLE.addFirst(buffer);
                idleBytes += buffer.capacity();
            }
        }
    }
}
