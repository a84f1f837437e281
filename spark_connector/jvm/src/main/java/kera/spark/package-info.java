/**
 * The entry: what Spark loads for {@code format("kera")}.
 * {@code META-INF/services} in the jar names {@code KeraSource}, and Python looks for it, so its name stays.
 * {@code KeraSource} chooses between the columnar engine and the Python data source.
 * {@code KeraTable} builds the scans and writes of the columnar engine,
 * and {@code KeraPythonTable} those of the Python data source.
 */
package kera.spark;
