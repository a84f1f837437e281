package kera.columns;

/** A field that nobody wants: its buffers are passed over without a look at them. */
record SkippedField(int nodes, int buffers, int views) implements FieldLoader {
    @Override
    public int load(Body body) {
        return body.skip(this);
    }

    @Override
    public void release() {
        // nothing was taken
    }
}
