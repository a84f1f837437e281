/**
 * Writes rows to a stream through Spark's interfaces for sinks, each row once.
 * On the driver, {@code KeraWrite} opens the write at the planner, and reports what the tasks have done.
 * In a task, {@code KeraDataWriter} gathers rows by streamlet, and has chunks sent when they are full.
 * {@code RowGatherer} takes rows of Spark's apart.
 * {@code Filling} and {@code DueChunks} send chunks earlier where there is a latency target.
 */
package kera.spark.write;
