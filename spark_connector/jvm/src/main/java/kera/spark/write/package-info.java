/**
 * Writes rows to a stream through Spark's interfaces for sinks, each row once.
 * On the driver, {@code KeraWrite} opens the write at the planner, and reports the results of the tasks.
 * In a task, {@code KeraDataWriter} gathers rows by streamlet, and has full chunks sent.
 * {@code RowGatherer} takes Spark's rows apart.
 * With a latency target, {@code Filling} and {@code DueChunks} send chunks earlier.
 */
package kera.spark.write;
