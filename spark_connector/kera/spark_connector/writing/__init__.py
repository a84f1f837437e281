"""DataFrames as records of streams, each row stored exactly once.

``writers`` has what Spark gets; others use nothing else. In a task, ``columns`` turns Spark's columns into those of a
stream, ``task`` gathers rows into chunks, and ``streamlet_writer`` stores the rows of one streamlet once however often
a task is run (the proof is there), with ``rows`` to compare them and ``streamlet_log`` to reach the broker.
"""
