/**
 * Shows chunks to Spark as columns, without copying their values.
 * {@code Columns} is the entry point: it loads a chunk, or several small ones, as one batch.
 * A {@code Body} takes payloads apart: an Arrow message, a lean payload, or several joined lean payloads.
 * {@code ColumnFactory} chooses the class of a column. A column checks its data before Spark sees it.
 * This package uses the chunks and errors of {@code kera.wire}, but no connections.
 */
package kera.columns;
