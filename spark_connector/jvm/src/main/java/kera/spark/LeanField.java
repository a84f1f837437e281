package kera.spark;

import java.util.List;
import org.apache.arrow.vector.TypeLayout;
import org.apache.arrow.vector.types.pojo.ArrowType;
import org.apache.arrow.vector.types.pojo.Field;

/**
 * Which kind of node a field of a schema is in a lean payload; see {@code kera.core.lean.kinds}.
 *
 * @param kind null: of this type a lean payload can only have nulls
 * @param width bytes of a value, of an offset, or values of each list of a fixed size
 * @param entries whether it is what is in a map, which cannot be null
 * @param fields what is within
 */
record LeanField(Kind kind, int width, boolean entries, List<LeanField> fields) {
    private static final int VIEW_BYTES = 16;

    /** The place of each is its number in the format. */
    enum Kind {
        NULL, BITS, FIXED_1, FIXED_2, FIXED_4, FIXED_8, FIXED_16, FIXED, BINARY, TEXT, LARGE_BINARY, LARGE_TEXT, LIST,
        LARGE_LIST, FIXED_LIST, STRUCT
    }

    static LeanField of(Field field) {
        return of(field, false);
    }

    private static LeanField of(Field field, boolean entries) {
        ArrowType type = field.getType();
        boolean map = type instanceof ArrowType.Map;
        List<LeanField> fields = field.getChildren().stream().map(each -> of(each, map)).toList();
        return switch (type.getTypeID()) {
            case Null -> new LeanField(Kind.NULL, 1, entries, fields);
            case Bool -> new LeanField(Kind.BITS, 1, entries, fields);
            case Int, FloatingPoint, Decimal, Date, Time, Timestamp, Duration, Interval -> number(type, entries);
            case FixedSizeBinary ->
                new LeanField(Kind.FIXED, ((ArrowType.FixedSizeBinary) type).getByteWidth(), entries, fields);
            case Binary -> new LeanField(Kind.BINARY, Integer.BYTES, entries, fields);
            case Utf8 -> new LeanField(Kind.TEXT, Integer.BYTES, entries, fields);
            case LargeBinary -> new LeanField(Kind.LARGE_BINARY, Long.BYTES, entries, fields);
            case LargeUtf8 -> new LeanField(Kind.LARGE_TEXT, Long.BYTES, entries, fields);
            case List, Map -> new LeanField(Kind.LIST, Integer.BYTES, entries, fields);
            case LargeList -> new LeanField(Kind.LARGE_LIST, Long.BYTES, entries, fields);
            case FixedSizeList ->
                new LeanField(Kind.FIXED_LIST, ((ArrowType.FixedSizeList) type).getListSize(), entries, fields);
            case Struct -> new LeanField(Kind.STRUCT, 1, entries, fields);
            default -> new LeanField(null, VIEW_BYTES, entries, fields);
        };
    }

    private static LeanField number(ArrowType type, boolean entries) {
        int width = TypeLayout.getTypeLayout(type).getBufferLayouts().get(1).getTypeBitWidth() / Byte.SIZE;
        Kind kind = switch (width) {
            case 1 -> Kind.FIXED_1;
            case 2 -> Kind.FIXED_2;
            case 4 -> Kind.FIXED_4;
            case 8 -> Kind.FIXED_8;
            case 16 -> Kind.FIXED_16;
            default -> Kind.FIXED;
        };
        return new LeanField(kind, width, entries, List.of());
    }
}
