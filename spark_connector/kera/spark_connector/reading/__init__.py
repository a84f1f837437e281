"""Streams as DataFrames: Spark's driver plans the reads, and its Python workers do them.

``batch``, ``streaming`` (``streaming_untold`` for older Sparks) and ``metadata`` are the readers that Spark gets;
``survey`` asks the cluster for the facts that ``planning`` needs, and ``cursor`` stores the progress of a query. Each
task gets a `KeraPartition`; there ``worker`` turns the chunks of ``chunks`` into Spark's batches. ``options`` defines
the options. The jar reads in Spark's JVM, and plans through ``service``.
"""
