package kera.spark.write;

import org.apache.spark.sql.connector.write.WriterCommitMessage;

/**
 * What a task has done.
 *
 * @param appended rows that this attempt has stored
 * @param found rows that an earlier one had stored
 * @param surplus rows that an earlier one had stored and this one did not have: the query is not deterministic
 */
record KeraWritten(long appended, long found, long surplus) implements WriterCommitMessage {
    private static final long serialVersionUID = 1L;
}
