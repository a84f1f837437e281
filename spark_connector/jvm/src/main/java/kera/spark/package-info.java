/**
 * The entry point that Spark loads for {@code format("kera")}.
 * {@code META-INF/services} in the jar names {@code KeraSource}, and Python looks for this class, so its name is fixed.
 * {@code KeraSource} chooses between the columnar engine and the Python data source.
 * {@code KeraTable} builds the scans and writes of the columnar engine,
 * and {@code KeraPythonTable} those of the Python data source.
 */
package kera.spark;
