package kera.columns;

import java.util.List;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.vector.TypeLayout;
import org.apache.arrow.vector.types.pojo.ArrowType;
import org.apache.arrow.vector.types.pojo.Field;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.types.TimeType;
import org.apache.spark.sql.vectorized.ColumnVector;

/**
 * Makes the column that reads an Arrow type.
 *
 * <p>Types that Spark does not have are widened, as in {@code kera.spark_connector.columns}. An Arrow type that is not
 * supported, or that does not match the wanted type, raises an {@link UnsupportedOperationException}.
 */
final class ColumnFactory {
    private static final long DAY_MS = 86_400_000;

    private final BufferAllocator allocator;

    ColumnFactory(BufferAllocator allocator) {
        this.allocator = allocator;
    }

    /** The column that reads `field` as `type`. */
    LoadedColumn column(Field field, DataType type) {
        LoadedColumn made = field.getDictionary() == null ? made(field, type) : null;
        if (made == null || !made.column().dataType().simpleString().equals(type.simpleString())) {
            throw new UnsupportedOperationException("field '" + field.getName() + "' has the Arrow type "
                    + field.getType() + ", which the columnar engine does not read as " + type.simpleString());
        }
        return made;
    }

    /** The loader that skips `field`. */
    static SkippedField skipped(Field field) {
        ArrowType type = field.getType();
        if (field.getDictionary() != null) {
            throw new UnsupportedOperationException("field '" + field.getName() + "' is of a dictionary");
        }
        int nodes = 1;
        int buffers = TypeLayout.getTypeBufferCount(type);
        int views = type instanceof ArrowType.Utf8View || type instanceof ArrowType.BinaryView ? 1 : 0;
        for (Field child : field.getChildren()) {
            SkippedField inner = skipped(child);
            nodes += inner.nodes();
            buffers += inner.buffers();
            views += inner.views();
        }
        return new SkippedField(nodes, buffers, views);
    }

    private LoadedColumn made(Field field, DataType type) {
        ArrowType from = field.getType();
        return switch (from.getTypeID()) {
            case Null -> leaf(field, LeafColumn.Layout.NOTHING, 0);
            case Bool -> leaf(field, LeafColumn.Layout.BITS, 0);
            case Int -> integer(field, (ArrowType.Int) from);
            case FloatingPoint -> floating(field, (ArrowType.FloatingPoint) from);
            case Decimal -> decimal(field, (ArrowType.Decimal) from);
            case Utf8, Binary -> leaf(field, LeafColumn.Layout.VARIABLE, Integer.BYTES);
            case LargeUtf8, LargeBinary -> leaf(field, LeafColumn.Layout.VARIABLE, Long.BYTES);
            case Utf8View -> new ViewColumn(DataTypes.StringType);
            case BinaryView -> new ViewColumn(DataTypes.BinaryType);
            case FixedSizeBinary -> new FixedWidthColumn.Bytes(((ArrowType.FixedSizeBinary) from).getByteWidth());
            case Date -> date(field, (ArrowType.Date) from);
            case Time -> time(field, (ArrowType.Time) from);
            case Timestamp -> timestamp(field, (ArrowType.Timestamp) from);
            case Duration -> duration(field, (ArrowType.Duration) from);
            case List, LargeList, FixedSizeList -> type instanceof ArrayType array ? list(field, array) : null;
            case Map -> map(field, type);
            case Struct -> type instanceof StructType struct ? struct(field, struct, false) : null;
            default -> null;
        };
    }

    private LeafColumn leaf(Field field, LeafColumn.Layout layout, int width) {
        return new LeafColumn(field.createVector(allocator), layout, width);
    }

    private LoadedColumn integer(Field field, ArrowType.Int from) {
        int width = from.getBitWidth() / Byte.SIZE;
        if (from.getIsSigned()) {
            return leaf(field, LeafColumn.Layout.FIXED, width);
        }
        DataType wider = switch (width) {
            case 1 -> DataTypes.ShortType;
            case 2 -> DataTypes.IntegerType;
            default -> DataTypes.LongType;
        };
        return width == Long.BYTES
                ? new FixedWidthColumn.Wide(DataTypes.createDecimalType(20, 0), width, false)
                : new NumberColumn(wider, "uint" + from.getBitWidth(), width, false, 1, 1);
    }

    private LoadedColumn floating(Field field, ArrowType.FloatingPoint from) {
        return switch (from.getPrecision()) {
            case HALF -> new FixedWidthColumn.Halves();
            case SINGLE -> leaf(field, LeafColumn.Layout.FIXED, Float.BYTES);
            case DOUBLE -> leaf(field, LeafColumn.Layout.FIXED, Double.BYTES);
        };
    }

    private LoadedColumn decimal(Field field, ArrowType.Decimal from) {
        int width = from.getBitWidth() / Byte.SIZE;
        if (from.getPrecision() > DecimalType.MAX_PRECISION() || from.getScale() < 0) {
            return null;
        }
        return from.getBitWidth() == 128
                ? leaf(field, LeafColumn.Layout.FIXED, width)
                : new FixedWidthColumn.Wide(
                        DataTypes.createDecimalType(from.getPrecision(), from.getScale()), width, true);
    }

    private LoadedColumn date(Field field, ArrowType.Date from) {
        return switch (from.getUnit()) {
            case DAY -> leaf(field, LeafColumn.Layout.FIXED, Integer.BYTES);
            case MILLISECOND -> new NumberColumn(DataTypes.DateType, "date64[ms]", Long.BYTES, true, 1, DAY_MS);
        };
    }

    private LoadedColumn time(Field field, ArrowType.Time from) {
        DataType type = TimeType.apply();
        return switch (from.getUnit()) {
            case SECOND -> new NumberColumn(type, "time32[s]", Integer.BYTES, true, 1_000_000_000, 1);
            case MILLISECOND -> new NumberColumn(type, "time32[ms]", Integer.BYTES, true, 1_000_000, 1);
            case MICROSECOND -> new NumberColumn(type, "time64[us]", Long.BYTES, true, 1000, 1);
            case NANOSECOND -> leaf(field, LeafColumn.Layout.FIXED, Long.BYTES);
        };
    }

    private LoadedColumn timestamp(Field field, ArrowType.Timestamp from) {
        DataType type = from.getTimezone() == null ? DataTypes.TimestampNTZType : DataTypes.TimestampType;
        return switch (from.getUnit()) {
            case SECOND -> new NumberColumn(type, "timestamp[s]", Long.BYTES, true, 1_000_000, 1);
            case MILLISECOND -> new NumberColumn(type, "timestamp[ms]", Long.BYTES, true, 1000, 1);
            case MICROSECOND -> leaf(field, LeafColumn.Layout.FIXED, Long.BYTES);
            case NANOSECOND -> new NumberColumn(type, "timestamp[ns]", Long.BYTES, true, 1, 1000);
        };
    }

    private LoadedColumn duration(Field field, ArrowType.Duration from) {
        DataType type = DataTypes.createDayTimeIntervalType();
        return switch (from.getUnit()) {
            case SECOND -> new NumberColumn(type, "duration[s]", Long.BYTES, true, 1_000_000, 1);
            case MILLISECOND -> new NumberColumn(type, "duration[ms]", Long.BYTES, true, 1000, 1);
            case MICROSECOND -> leaf(field, LeafColumn.Layout.FIXED, Long.BYTES);
            case NANOSECOND -> new NumberColumn(type, "duration[ns]", Long.BYTES, true, 1, 1000);
        };
    }

    private LoadedColumn list(Field field, ArrayType type) {
        LoadedColumn elements = column(field.getChildren().get(0), type.elementType());
        if (field.getType() instanceof ArrowType.FixedSizeList fixed) {
            return ListColumn.ofSize(type, elements, fixed.getListSize());
        }
        boolean large = field.getType() instanceof ArrowType.LargeList;
        return ListColumn.ofOffsets(type, elements, large ? Long.BYTES : Integer.BYTES);
    }

    /** The column of a map: Arrow stores maps as lists of structs, and Spark may want either form. */
    private LoadedColumn map(Field field, DataType type) {
        Field entries = field.getChildren().get(0);
        if (type instanceof ArrayType array && array.elementType() instanceof StructType entry) {
            LoadedColumn both = struct(entries, entry, true);
            return both == null ? null
                    : ListColumn.ofOffsets(type, NeverNull.unlessNullable(entries, both), Integer.BYTES);
        }
        if (!(type instanceof MapType map)) {
            return null;
        }
        LoadedColumn keys = column(entries.getChildren().get(0), map.keyType());
        LoadedColumn values = column(entries.getChildren().get(1), map.valueType());
        StructType entry = new StructType().add("key", map.keyType()).add("value", map.valueType());
        LoadedColumn both = new StructColumn(entry,
                new FieldLoader[] {NeverNull.unlessNullable(entries.getChildren().get(0), keys), values},
                new ColumnVector[] {keys.column(), values.column()});
        return ListColumn.ofOffsets(type, NeverNull.unlessNullable(entries, both), Integer.BYTES);
    }

    /** The column of a struct. `entries`: the structs are the entries of a map, and their first field has the keys. */
    private LoadedColumn struct(Field field, StructType type, boolean entries) {
        List<Field> there = field.getChildren();
        FieldLoader[] loaders = there.stream().map(ColumnFactory::skipped).toArray(FieldLoader[]::new);
        StructField[] wanted = type.fields();
        ColumnVector[] children = new ColumnVector[wanted.length];
        for (int index = 0; index < wanted.length; index++) {
            int at = place(there, wanted[index].name(), index);
            if (at < 0) {
                return null;
            }
            LoadedColumn child = column(there.get(at), wanted[index].dataType());
            loaders[at] = entries && at == 0 ? NeverNull.unlessNullable(there.get(at), child) : child;
            children[index] = child.column();
        }
        return new StructColumn(type, loaders, children);
    }

    /** The index of the field `name`, or -1; of several such fields `index` if it is one of them, else the first. */
    private static int place(List<Field> fields, String name, int index) {
        if (index < fields.size() && fields.get(index).getName().equals(name)) {
            return index;
        }
        for (int at = 0; at < fields.size(); at++) {
            if (fields.get(at).getName().equals(name)) {
                return at;
            }
        }
        return -1;
    }
}
