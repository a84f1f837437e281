/**
 * Shows chunks to Spark as columns, without a copy of their values.
 * {@code Columns} is the entry: it loads a chunk, or several small ones, as one batch.
 * A {@code Body} takes payloads apart: a message of Arrow's, a lean payload, or lean payloads that are joined.
 * {@code ColumnFactory} chooses the class of a column. A column checks what it takes before Spark sees it.
 * This package uses the chunks and errors of {@code kera.wire}, and no connection.
 */
package kera.columns;
