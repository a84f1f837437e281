package kera.columns;

import java.util.ArrayList;
import java.util.List;
import org.apache.arrow.memory.ArrowBuf;
import org.apache.arrow.vector.FieldVector;
import org.apache.arrow.vector.ipc.message.ArrowFieldNode;
import org.apache.spark.sql.vectorized.ArrowColumnVector;
import org.apache.spark.sql.vectorized.ColumnVector;

/** A column that is read in place, by Spark's own column class over an Arrow vector. */
final class LeafColumn extends ArrowColumnVector implements LoadedColumn {
    /** The buffers of a vector, and how their lengths are found. */
    enum Layout { NOTHING, BITS, FIXED, VARIABLE }

    private final FieldVector vector;
    private final Layout layout;
    private final int width;
    private final List<ArrowBuf> buffers = new ArrayList<>(3);

    /**
     * A column over `vector`.
     *
     * @param width bytes per value, or per offset
     */
    LeafColumn(FieldVector vector, Layout layout, int width) {
        super(vector);
        this.vector = vector;
        this.layout = layout;
        this.width = width;
    }

    @Override
    public int load(Body body) {
        int count = body.node();
        buffers.clear();
        if (layout != Layout.NOTHING) {
            buffers.add(body.validity(count));
        }
        switch (layout) {
            case NOTHING -> { }
            case BITS -> buffers.add(body.data(Body.bits(count)));
            case FIXED -> buffers.add(body.data((long) count * width));
            case VARIABLE -> {
                ArrowBuf offsets = body.offsets(count, width);
                buffers.add(offsets);
                buffers.add(body.data(Body.end(offsets, count, width)));
            }
        }
        vector.loadFieldBuffers(new ArrowFieldNode(count, body.nulls()), buffers);
        return count;
    }

    @Override
    public void release() {
        vector.clear();
    }

    @Override
    public ColumnVector column() {
        return this;
    }
}
