package kera.wire;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.zip.CRC32C;

import org.apache.arrow.memory.util.MemoryUtil;

/** One chunk in memory; valid until the reader is asked for the next one or is closed. See {@code docs/format.md}. */
public final class Chunk {

    public static final int HEADER_BYTES = 128;
    /** The SDK's, see {@code kera.core.format.joining}. */
    private static final int SMALL_PAYLOAD_BYTES_MAX = 16 << 10;

    private static final int PAYLOAD_BYTES_MAX = 1 << 30;
    private static final int ALIGNMENT_BYTES = 64;
    private static final int MAGIC = 'K' | 'E' << 8 | 'R' << 16 | 'A' << 24;
    private static final int ARROW_VERSION = 1;
    private static final int LEAN_VERSION = 2;
    private static final int PUNCTUATION = 4; // in the flags
    private static final int HEADER_CRC_AT = 84;
    private static final int PLACEMENT_AT = 88;
    private static final int PLACEMENT_CRC_AT = 124;

    /** Whether its payload is a lean one, and not a message of Arrow's. */
    public final boolean lean;
    /** What the body of a lean payload was compressed with. */
    public final int codec;
    /** Header and payload, without padding: direct, little-endian, from 0 to its limit. */
    final ByteBuffer memory;
    /** Where the payload begins. */
    public final long payloadAddress;
    public final int payloadBytes;
    public final int recordCount;
    /** The version of its stream's schema that it was written with. */
    public final int schemaId;
    /** Ordinal of the first record within its entry. */
    public final long firstRecord;
    public final Position start;
    /** Where the chunk after this one starts. */
    public final Position next;
    /** Whether it has no records, and only says that nothing older comes behind it. */
    final boolean punctuation;
    /** Whether it lies in a broker's memory. */
    final boolean inPlace;
    /** Keeps the mapping or the buffer reachable. */
    public final Object owner;

    private final Stretch stretch;

    private Chunk(Stretch stretch, int at, ByteBuffer header, Position before) {
        this.stretch = stretch;
        lean = header.get(4) == LEAN_VERSION;
        punctuation = (header.get(5) & PUNCTUATION) != 0;
        codec = header.getInt(44);
        payloadBytes = header.getInt(8);
        recordCount = header.getInt(12);
        schemaId = header.getInt(28);
        firstRecord = header.getLong(104);
        memory = stretch.bytes().slice(at, HEADER_BYTES + payloadBytes).order(ByteOrder.LITTLE_ENDIAN);
        payloadAddress = MemoryUtil.getByteBufferAddress(memory) + HEADER_BYTES;
        long group = header.getLong(88);
        int segment = header.getInt(96);
        boolean follows = group == before.group() && segment == before.segment();
        start = follows ? before : new Position(group, segment, 0);
        next = start.plus(chunkBytes(payloadBytes));
        inPlace = stretch.arena() != null;
        owner = inPlace ? stretch.arena() : stretch.bytes();
    }

    /**
     * The chunk at {@code at} of a stretch, checked. {@code before}: where the one before it ended, or where the
     * stretch starts. Throws {@link KeraException}: what is there is no chunk, or one of another schema. In a broker's
     * memory that can also mean that it is not {@link #intact}: to be asked before anything is made of it.
     */
    static Chunk open(Stretch stretch, int at, Position before, Piece piece, boolean verifyPayload) {
        ByteBuffer bytes = stretch.bytes();
        if (bytes.limit() - at < HEADER_BYTES) {
            throw corrupt("chunk header cut short at offset " + at);
        }
        byte[] copied = new byte[HEADER_BYTES]; // what is checked must be what is used, whatever happens to the memory
        bytes.get(at, copied);
        ByteBuffer header = ByteBuffer.wrap(copied).order(ByteOrder.LITTLE_ENDIAN);
        if (header.getInt(0) != MAGIC) {
            throw corrupt("no chunk at offset " + at + ": magic is 0x" + Integer.toHexString(header.getInt(0)));
        }
        if (checksum(copied, 0, HEADER_CRC_AT) != header.getInt(HEADER_CRC_AT)) {
            throw corrupt("chunk header at offset " + at + " does not match its checksum");
        }
        int version = header.get(4) & 0xFF;
        if (version != ARROW_VERSION && version != LEAN_VERSION || header.getShort(6) != HEADER_BYTES) {
            throw corrupt("chunk at offset " + at + " has format version " + version + ", this program knows "
                    + LEAN_VERSION + " and older ones");
        }
        if (checksum(copied, PLACEMENT_AT, PLACEMENT_CRC_AT - PLACEMENT_AT) != header.getInt(PLACEMENT_CRC_AT)) {
            throw corrupt("chunk placement at offset " + at + " does not match its checksum");
        }
        long payloadBytes = Integer.toUnsignedLong(header.getInt(8));
        int rest = bytes.limit() - at - HEADER_BYTES;
        if (payloadBytes > PAYLOAD_BYTES_MAX || padded(payloadBytes) > rest) {
            throw corrupt("chunk at offset " + at + " is cut short: " + rest + " of " + padded(payloadBytes)
                    + " payload bytes");
        }
        if (verifyPayload) {
            CRC32C crc = new CRC32C();
            crc.update(bytes.slice(at + HEADER_BYTES, (int) padded(payloadBytes)));
            if ((int) crc.getValue() != header.getInt(80)) {
                throw corrupt("chunk payload at offset " + at + " does not match its checksum (stream "
                        + header.getLong(16) + ", streamlet " + header.getInt(24) + ", sequence " + header.getLong(48)
                        + ")");
            }
        }
        if ((header.get(5) & PUNCTUATION) != 0) {
            if (header.getInt(12) != 0 || payloadBytes != 0) {
                throw corrupt("the chunk at offset " + at + " is a punctuation, and says to have records");
            }
        } else if (piece.schemaIdFor(header.getInt(28)) == 0) {
            throw new KeraException("SchemaMismatch", "chunk has schema " + Integer.toUnsignedString(header.getInt(28))
                    + ", stream '" + piece.stream + "' has none of that number", false);
        }
        return new Chunk(stretch, at, header, before);
    }

    /** Length of the whole chunk: header, payload, padding. */
    int chunkBytes() {
        return chunkBytes(payloadBytes);
    }

    /** Whether it is of the kind that is joined with others: in place, what it costs would be more than a copy does. */
    public boolean isSmall() {
        return lean && codec == 0 && payloadBytes <= SMALL_PAYLOAD_BYTES_MAX;
    }

    /** Whether what is at {@code at} of its stretch looks like a small chunk that follows this one. */
    boolean isFollowedBySmall(int at) {
        ByteBuffer bytes = stretch.bytes();
        return bytes.limit() - at >= HEADER_BYTES
                && bytes.get(at + 4) == LEAN_VERSION
                && bytes.getInt(at + 44) == 0
                && Integer.compareUnsigned(bytes.getInt(at + 8), SMALL_PAYLOAD_BYTES_MAX) <= 0
                && bytes.getInt(at + 28) == schemaId
                && bytes.getLong(at + 88) == start.group()
                && bytes.getInt(at + 96) == start.segment()
                && bytes.getLong(at + 104) == firstRecord + recordCount;
    }

    /** Whether the bytes are still this chunk's. To be asked after they were looked at; true for copies. */
    public boolean intact() {
        return stretch.intact();
    }

    private static int chunkBytes(int payloadBytes) {
        return HEADER_BYTES + (int) padded(payloadBytes);
    }

    private static long padded(long payloadBytes) {
        return (payloadBytes + ALIGNMENT_BYTES - 1) & -ALIGNMENT_BYTES;
    }

    private static int checksum(byte[] bytes, int from, int length) {
        CRC32C crc = new CRC32C();
        crc.update(bytes, from, length);
        return (int) crc.getValue();
    }

    private static KeraException corrupt(String message) {
        return new KeraException("CorruptChunk", message, false);
    }
}
