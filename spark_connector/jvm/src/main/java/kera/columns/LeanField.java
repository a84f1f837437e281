package kera.columns;

import java.util.List;
import org.apache.arrow.vector.TypeLayout;
import org.apache.arrow.vector.types.pojo.ArrowType;
import org.apache.arrow.vector.types.pojo.Field;

/**
 * A field of a schema with its kind of node in a lean payload; see {@code kera.core.format.lean.kinds}.
 *
 * @param kind kind of node; null if a lean payload can only have nulls of this type
 * @param width bytes per value or per offset, or the number of values in a list of fixed size
 * @param neverNull whether the field cannot have nulls: the entries of a map, their keys, or a column that is not
 *     nullable
 * @param fields the nested fields
 */
record LeanField(Kind kind, int width, boolean neverNull, List<LeanField> fields) {
    private static final int VIEW_BYTES = 16;

    /** The kinds of nodes; the ordinal of a kind is its number in the format. */
    enum Kind {
        NULL, BITS, FIXED_1, FIXED_2, FIXED_4, FIXED_8, FIXED_16, FIXED, BINARY, TEXT, LARGE_BINARY, LARGE_TEXT, LIST,
        LARGE_LIST, FIXED_LIST, STRUCT
    }

    /** The field of a column. */
    static LeanField ofColumn(Field field) {
        return of(field, !field.isNullable());
    }

    private static LeanField of(Field field) {
        return of(field, false);
    }

    private static LeanField of(Field field, boolean neverNull) {
        ArrowType type = field.getType();
        List<LeanField> fields = type instanceof ArrowType.Map
                ? List.of(entries(field.getChildren().get(0)))
                : field.getChildren().stream().map(LeanField::of).toList();
        return switch (type.getTypeID()) {
            case Null -> new LeanField(Kind.NULL, 1, false, fields);
            case Bool -> new LeanField(Kind.BITS, 1, neverNull, fields);
            case Int, FloatingPoint, Decimal, Date, Time, Timestamp, Duration, Interval -> number(type, neverNull);
            case FixedSizeBinary ->
                new LeanField(Kind.FIXED, ((ArrowType.FixedSizeBinary) type).getByteWidth(), neverNull, fields);
            case Binary -> new LeanField(Kind.BINARY, Integer.BYTES, neverNull, fields);
            case Utf8 -> new LeanField(Kind.TEXT, Integer.BYTES, neverNull, fields);
            case LargeBinary -> new LeanField(Kind.LARGE_BINARY, Long.BYTES, neverNull, fields);
            case LargeUtf8 -> new LeanField(Kind.LARGE_TEXT, Long.BYTES, neverNull, fields);
            case List, Map -> new LeanField(Kind.LIST, Integer.BYTES, neverNull, fields);
            case LargeList -> new LeanField(Kind.LARGE_LIST, Long.BYTES, neverNull, fields);
            case FixedSizeList ->
                new LeanField(Kind.FIXED_LIST, ((ArrowType.FixedSizeList) type).getListSize(), neverNull, fields);
            case Struct -> new LeanField(Kind.STRUCT, 1, neverNull, fields);
            default -> new LeanField(null, VIEW_BYTES, neverNull, fields);
        };
    }

    private static LeanField entries(Field field) {
        LeanField key = of(field.getChildren().get(0), true);
        return new LeanField(Kind.STRUCT, 1, true, List.of(key, of(field.getChildren().get(1))));
    }

    private static LeanField number(ArrowType type, boolean neverNull) {
        int width = TypeLayout.getTypeLayout(type).getBufferLayouts().get(1).getTypeBitWidth() / Byte.SIZE;
        Kind kind = switch (width) {
            case 1 -> Kind.FIXED_1;
            case 2 -> Kind.FIXED_2;
            case 4 -> Kind.FIXED_4;
            case 8 -> Kind.FIXED_8;
            case 16 -> Kind.FIXED_16;
            default -> Kind.FIXED;
        };
        return new LeanField(kind, width, neverNull, List.of());
    }
}
