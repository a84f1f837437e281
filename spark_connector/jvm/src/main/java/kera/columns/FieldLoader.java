package kera.columns;

/** Takes the nodes and buffers of one field and its nested fields from a record batch. */
interface FieldLoader {
    /** Take the field's nodes and buffers from the current place in `body`, check them, and return its value count. */
    int load(Body body);

    /** Release what was loaded. */
    void release();
}
