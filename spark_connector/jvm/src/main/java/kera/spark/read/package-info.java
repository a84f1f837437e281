/**
 * Reads streams through Spark's interfaces for sources: batches, micro-batches and real-time mode.
 * On the driver, {@code KeraScanBuilder} makes a scan. The planner cuts it into pieces, one for each task.
 * In a task, {@code KeraColumnarReader} makes batches of columns from the chunks of its piece,
 * and {@code KeraRealTimeReader} returns rows as they arrive.
 * Spark creates the metrics by their class names, so {@code KeraMetrics} is public.
 */
package kera.spark.read;
