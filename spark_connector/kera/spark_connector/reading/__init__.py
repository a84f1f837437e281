"""Streams as DataFrames: what Spark's driver plans of them, and what its Python workers read.

``batch``, ``streaming`` (``streaming_untold`` for older Sparks) and ``metadata`` are the readers that Spark gets;
``survey`` asks the cluster what ``planning`` has to know, ``cursor`` stores how far a query is. In the tasks, each of
which gets a `KeraPartition`, ``worker`` makes Spark's batches of what ``chunks`` brings. What options mean is left to
``options``, and reading in Spark's JVM to the jar, which plans by way of ``service``.
"""
