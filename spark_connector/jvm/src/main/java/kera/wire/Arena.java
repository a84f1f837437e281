package kera.wire;

import java.io.IOException;
import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.lang.ref.WeakReference;
import java.net.ProtocolException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.OpenOption;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;

/**
 * A broker's memory, mapped read-only.
 *
 * <p>All readers of this JVM share the mapping and its page tables, which a separate mapping would have to fill again,
 * page by page. It is never unmapped while anything refers to it, whatever happens to the broker. A buffer has at most
 * 2 GiB, so the slots are mapped in extents. All extents are mapped at once, because the interrupt of one thread would
 * close a file that is kept open for later, for all threads.
 */
final class Arena {

    private static final long EXTENT_BYTES_MAX = 1L << 30;
    private static final Set<OpenOption> OPTIONS = Set.of(StandardOpenOption.READ, LinkOption.NOFOLLOW_LINKS);
    private static final int FILE_TYPE = 0170000;
    private static final int REGULAR_FILE = 0100000;
    private static final VarHandle GENERATION =
            MethodHandles.byteBufferViewVarHandle(long[].class, ByteOrder.LITTLE_ENDIAN);

    /**
     * The current arena by push socket and memory domain. Weak, because mapped memory stays in use even if its broker
     * is gone and its file removed; connections and chunks refer to an arena as long as they need it.
     */
    private static final Map<String, WeakReference<Arena>> MAPPED = new HashMap<>();

    /** The identity of the file, and its layout. */
    private record Identity(Object device, Object inode, long bytes, long slots, long slotBytes, long slotsAt,
            long rowsAt, long rowBytes) {
    }

    final long slots;
    final long slotBytes;
    private final Identity identity;
    private final long slotsAt;
    private final int rowBytes;
    private final ByteBuffer rows;
    private final int slotsPerExtent;
    private final ByteBuffer[] extents;

    private Arena(Identity identity, Wire.Hello hello) throws IOException {
        this.identity = identity;
        slots = hello.slots();
        slotBytes = hello.slotBytes();
        slotsAt = hello.slotsAt();
        rowBytes = (int) hello.rowBytes();
        slotsPerExtent = (int) Math.max(1, EXTENT_BYTES_MAX / slotBytes);
        try (FileChannel file = FileChannel.open(Path.of(hello.arenaPath()), OPTIONS)) {
            if (file.size() < hello.arenaBytes()) {
                throw new IOException("it has " + file.size() + " of " + hello.arenaBytes() + " bytes");
            }
            extents = new ByteBuffer[(int) ((slots + slotsPerExtent - 1) / slotsPerExtent)];
            rows = file.map(FileChannel.MapMode.READ_ONLY, hello.rowsAt(), slots * rowBytes);
            for (int index = 0; index < extents.length; index++) {
                long first = (long) index * slotsPerExtent;
                long count = Math.min(slotsPerExtent, slots - first);
                extents[index] =
                        file.map(FileChannel.MapMode.READ_ONLY, slotsAt + first * slotBytes, count * slotBytes);
            }
        }
    }

    /**
     * The memory of a domain of the broker whose push socket is {@code socket}. Throws {@link ProtocolException} if the
     * layout that the broker describes is impossible, another {@link IOException} if the memory cannot be mapped.
     */
    static Arena of(String socket, String domain, Wire.Hello hello) throws IOException {
        requirePossible(hello);
        Map<String, Object> file = attributes(hello.arenaPath());
        if (((int) file.get("mode") & FILE_TYPE) != REGULAR_FILE
                || !file.get("uid").equals(attributes(socket).get("uid"))) {
            throw new IOException("it is not a regular file of the broker's user");
        }
        Identity identity = new Identity(file.get("dev"), file.get("ino"), hello.arenaBytes(), hello.slots(),
                hello.slotBytes(), hello.slotsAt(), hello.rowsAt(), hello.rowBytes());
        synchronized (MAPPED) {
            WeakReference<Arena> mapped = MAPPED.get(socket + " " + domain);
            Arena known = mapped == null ? null : mapped.get(); // a mapped file's inode is not reused for another file
            if (known == null || !known.identity.equals(identity)) {
                known = new Arena(identity, hello);
                MAPPED.put(socket + " " + domain, new WeakReference<>(known));
            }
            return known;
        }
    }

    /** The attributes of the file itself, not of a link's target: other users may be able to write to its directory. */
    private static Map<String, Object> attributes(String path) throws IOException {
        return Files.readAttributes(Path.of(path), "unix:dev,ino,uid,mode", LinkOption.NOFOLLOW_LINKS);
    }

    private static void requirePossible(Wire.Hello hello) throws ProtocolException {
        boolean possible;
        try {
            long rowsEnd = Math.addExact(hello.rowsAt(), Math.multiplyExact(hello.slots(), hello.rowBytes()));
            long slotsEnd = Math.addExact(hello.slotsAt(), Math.multiplyExact(hello.slots(), hello.slotBytes()));
            possible = hello.slots() > 0 && hello.slotBytes() > 0 && hello.rowBytes() >= Long.BYTES
                    && hello.rowBytes() % Long.BYTES == 0 && hello.rowsAt() % Long.BYTES == 0 && hello.rowsAt() >= 0
                    && hello.slotsAt() >= 0 && Math.max(rowsEnd, slotsEnd) <= hello.arenaBytes()
                    && hello.slots() * hello.rowBytes() <= Integer.MAX_VALUE
                    && hello.slotBytes() <= Integer.MAX_VALUE;
        } catch (ArithmeticException error) {
            possible = false;
        }
        if (!possible) {
            throw new ProtocolException("the broker's memory " + hello.arenaPath() + " is not as it says");
        }
    }

    /** How often a slot has been released so far; bytes read before this call are valid if the number is unchanged. */
    long generation(int slot) {
        VarHandle.acquireFence();
        return (long) GENERATION.getAcquire(rows, slot * rowBytes);
    }

    /**
     * The bytes of a slot from offset {@code at} of the file on, little-endian. Throws {@link ProtocolException} unless
     * they lie in the slot.
     */
    ByteBuffer bytes(long slot, long at, long length) throws ProtocolException {
        long within = at - slotsAt - slot * slotBytes;
        if (slot >= slots || at < 0 || length <= 0 || within < 0 || within > slotBytes - length) {
            throw new ProtocolException("a run of " + length + " bytes at " + Long.toUnsignedString(at)
                    + " does not lie in slot " + slot);
        }
        long inExtent = slot % slotsPerExtent * slotBytes + within;
        return extents[(int) (slot / slotsPerExtent)].slice((int) inExtent, (int) length)
                .order(ByteOrder.LITTLE_ENDIAN);
    }
}
