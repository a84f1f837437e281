package kera.columns;

/** A field that is not wanted: its buffers are skipped without reading them. */
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
