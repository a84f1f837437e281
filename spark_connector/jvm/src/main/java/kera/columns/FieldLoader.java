package kera.columns;

/** Takes the nodes and buffers of one field, and of the fields in it, from a record batch. */
interface FieldLoader {
    /** Takes what is the field's from where `body` is, checks all of it, and returns the number of its values. */
    int load(Body body);

    /** Lets go of what was loaded. */
    void release();
}
