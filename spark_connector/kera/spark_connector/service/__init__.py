"""The planner of the columnar engine: ``python -m kera.spark_connector.service``, a child process of Spark's JVM.

The engine reads by itself, and knows nothing of clusters: it asks this process where to read, over a pipe. All of
planning, what a checkpoint holds, the named cursor, and what follows from an error is decided here, by the very same
code as when Spark runs the Python data source itself. The same program runs beside executors, for `route` alone.

``lines`` is the protocol on the pipe, ``methods`` what can be asked; ``pieces`` has what the engine gets to know of a
task's part, ``routing`` where a task goes on when its broker does not answer.
"""
