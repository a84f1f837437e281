package kera.wire;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.zip.CRC32C;

import org.apache.arrow.memory.util.MemoryUtil;

/** A chunk in memory, valid until the reader is asked for the next one or is closed. See {@code docs/format.md}. */
public final class Chunk {

    public static final int HEADER_BYTES = 128;
    /** The same limit as the SDK's, see {@code kera.core.format.joining}. */
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

    /** Whether the payload is lean; otherwise it is an Arrow message. */
    public final boolean lean;
    /** The codec that compressed the body of a lean payload. */
    public final int codec;
    /** Header and payload, without padding: a direct, little-endian buffer, from 0 to its limit. */
    final ByteBuffer memory;
    /** Address of the payload. */
    public final long payloadAddress;
    public final int payloadBytes;
    public final int recordCount;
    /** The version of the stream's schema that the chunk was written with. */
    public final int schemaId;
    /** Ordinal of the first record within its entry. */
    public final long firstRecord;
    public final Position start;
    /** Where the chunk after this one starts. */
    public final Position next;
    /** Whether the chunk has no records, and only says that no older records follow. */
    final boolean punctuation;
    /** Whether the chunk lies in a broker's memory. */
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
     * Check and return the chunk at offset {@code at} of a stretch. {@code before} is the end of the chunk before it,
     * or the start of the stretch. Throws {@link KeraException} if there is no valid chunk, or one of an unknown
     * schema. In a broker's memory the reason may be that the stretch is not {@link Stretch#intact}: the caller must
     * check this before it uses the chunk or the error.
     */
    static Chunk open(Stretch stretch, int at, Position before, Piece piece, boolean verifyPayload) {
        ByteBuffer bytes = stretch.bytes();
        if (bytes.limit() - at < HEADER_BYTES) {
            throw corrupt("chunk header cut short at offset " + at);
        }
        byte[] copied = new byte[HEADER_BYTES]; // the checked bytes must be the used ones, even if the memory changes
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

    /** Length of the whole chunk: header, payload and padding. */
    int chunkBytes() {
        return chunkBytes(payloadBytes);
    }

    /** Whether the chunk may be joined with others: reading it in place would cost more than a copy. */
    public boolean isSmall() {
        return lean && codec == 0 && payloadBytes <= SMALL_PAYLOAD_BYTES_MAX;
    }

    /** Whether the bytes at offset {@code at} of the stretch look like a small chunk that follows this one. */
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

    /** Whether the bytes are still this chunk's; always true for copies. To be called after the bytes were read. */
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
