"""The planner of the columnar engine: ``python -m kera.spark_connector.service``, a child process of Spark's JVM.

The engine reads records, but leaves the cluster to this process: it asks over a pipe where to read. This process does
all of planning, the checkpoint's content, the named cursor, and the reactions to errors, with the same code as when
Spark runs the Python data source. The same program runs beside executors, only for routing.

``lines`` is the protocol on the pipe, ``methods`` has its methods; ``pieces`` describes a task's piece for the engine,
``routing`` decides where a task continues to read if its broker does not answer, and ``writes`` has the same for
writes.
"""
