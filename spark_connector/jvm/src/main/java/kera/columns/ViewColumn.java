package kera.columns;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import org.apache.arrow.memory.ArrowBuf;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/** Strings or bytes as views: short values are in the views, longer ones in any of several buffers. */
final class ViewColumn extends OwnColumn implements LoadedColumn {
    private static final int VIEW_BYTES = 16;
    private static final int INLINE_BYTES_MAX = 12;
    private static final int INLINE_AT = 4;
    private static final int BUFFER_AT = 8;
    private static final int OFFSET_AT = 12;

    private ByteBuffer views = ByteBuffer.allocate(0);
    private ArrowBuf[] data = new ArrowBuf[0];

    ViewColumn(DataType type) {
        super(type);
    }

    @Override
    public int load(Body body) {
        int count = begin(body);
        long bytes = (long) count * VIEW_BYTES;
        ArrowBuf stored = body.data(bytes);
        if (bytes > views.capacity()) {
            if (bytes > Integer.MAX_VALUE - VIEW_BYTES) {
                throw body.corrupt(count + " views");
            }
            views = ByteBuffer.allocate((int) bytes).order(ByteOrder.LITTLE_ENDIAN);
        }
        stored.getBytes(0, views.array(), 0, (int) bytes);
        data = new ArrowBuf[body.variadic()];
        for (int index = 0; index < data.length; index++) {
            data[index] = body.data(0);
        }
        long lengths = 0;
        for (int row = 0; row < count; row++) {
            check(row, body);
            lengths += views.getInt(row * VIEW_BYTES);
        }
        body.writeOut(lengths);
        return count;
    }

    /** Check that the view lies within its buffer. The view of a null may be anything, so its length is set to 0. */
    private void check(int row, Body body) {
        int view = row * VIEW_BYTES;
        if (isNullAt(row)) {
            views.putInt(view, 0);
            return;
        }
        int length = views.getInt(view);
        if (length >= 0 && length <= INLINE_BYTES_MAX) {
            return;
        }
        int buffer = views.getInt(view + BUFFER_AT);
        long offset = views.getInt(view + OFFSET_AT);
        if (length < 0 || buffer < 0 || buffer >= data.length || offset < 0
                || offset + length > data[buffer].capacity()) {
            throw body.corrupt("a view of " + length + " bytes at " + offset + " of buffer " + buffer);
        }
    }

    @Override
    public void release() {
        end();
        data = new ArrowBuf[0];
    }

    @Override
    public ColumnVector column() {
        return this;
    }

    @Override
    public UTF8String getUTF8String(int row) {
        if (isNullAt(row)) {
            return null;
        }
        int view = row * VIEW_BYTES;
        int length = views.getInt(view);
        return length <= INLINE_BYTES_MAX
                ? UTF8String.fromBytes(views.array(), view + INLINE_AT, length)
                : UTF8String.fromAddress(null, address(view), length);
    }

    @Override
    public byte[] getBinary(int row) {
        if (isNullAt(row)) {
            return null;
        }
        int view = row * VIEW_BYTES;
        byte[] value = new byte[views.getInt(view)];
        if (value.length <= INLINE_BYTES_MAX) {
            System.arraycopy(views.array(), view + INLINE_AT, value, 0, value.length);
        } else {
            Platform.copyMemory(null, address(view), value, Platform.BYTE_ARRAY_OFFSET, value.length);
        }
        return value;
    }

    private long address(int view) {
        return data[views.getInt(view + BUFFER_AT)].memoryAddress() + views.getInt(view + OFFSET_AT);
    }
}
