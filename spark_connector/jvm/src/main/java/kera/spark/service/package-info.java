/**
 * Runs and calls the planner, a Python program that decides everything except how to move bytes.
 * The whole JVM shares a {@code Service}; {@code ServiceProcess} is one process of it.
 * {@code Environment} finds what a JVM lacks to run the columnar engine.
 * {@code KeraAnalysisException} shows an error to the user of a driver.
 * Readers and writers use these on the driver and in tasks.
 */
package kera.spark.service;
