package kera.columns;

import org.apache.arrow.memory.ArrowBuf;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;

/** Arrow lists of any kind, as arrays; and maps, which are lists of entries. */
final class ListColumn extends OwnColumn implements LoadedColumn {
    private final LoadedColumn elements;
    private final int width;
    private final int size;
    private ArrowBuf offsets;

    private ListColumn(DataType type, LoadedColumn elements, int width, int size) {
        super(type);
        this.elements = elements;
        this.width = width;
        this.size = size;
    }

    /** Lists whose offsets have `width` bytes. */
    static ListColumn ofOffsets(DataType type, LoadedColumn elements, int width) {
        return new ListColumn(type, elements, width, 0);
    }

    /** Lists that all have `size` elements. */
    static ListColumn ofSize(DataType type, LoadedColumn elements, int size) {
        return new ListColumn(type, elements, 0, size);
    }

    @Override
    public int load(Body body) {
        int count = begin(body);
        long needed = (long) count * size;
        if (width > 0) {
            offsets = body.offsets(count, width);
            needed = Body.end(offsets, count, width);
        }
        int there = elements.load(body);
        if (there < needed) {
            throw body.corrupt("lists of " + needed + " elements, of which there are " + there);
        }
        return count;
    }

    @Override
    public void release() {
        end();
        offsets = null;
        elements.release();
    }

    @Override
    public ColumnVector column() {
        return this;
    }

    /** The index of the first element of the list in `row`; the list ends where that of the next row begins. */
    int start(int row) {
        return switch (width) {
            case 0 -> row * size;
            case Integer.BYTES -> offsets.getInt((long) row * Integer.BYTES);
            default -> (int) offsets.getLong((long) row * Long.BYTES);
        };
    }

    @Override
    public ColumnarArray getArray(int row) {
        if (isNullAt(row)) {
            return null;
        }
        int start = start(row);
        return new ColumnarArray(elements.column(), start, start(row + 1) - start);
    }

    @Override
    public ColumnarMap getMap(int row) {
        if (isNullAt(row)) {
            return null;
        }
        int start = start(row);
        ColumnVector entries = elements.column();
        return new ColumnarMap(entries.getChild(0), entries.getChild(1), start, start(row + 1) - start);
    }

    /** The elements; for maps, the keys or the values. */
    @Override
    public ColumnVector getChild(int ordinal) {
        ColumnVector all = elements.column();
        return dataType() instanceof MapType ? all.getChild(ordinal) : all;
    }
}
