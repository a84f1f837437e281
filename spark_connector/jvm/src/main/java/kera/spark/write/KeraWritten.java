package kera.spark.write;

import org.apache.spark.sql.connector.write.WriterCommitMessage;

/**
 * The result of a task.
 *
 * @param appended number of rows that this attempt stored
 * @param found number of rows that an earlier attempt had stored
 * @param surplus number of rows that an earlier attempt stored and this one does not have: the query is not
 *     deterministic
 */
record KeraWritten(long appended, long found, long surplus) implements WriterCommitMessage {
    private static final long serialVersionUID = 1L;
}
