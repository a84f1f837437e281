"""DataFrames as records of streams, each row stored exactly once.

``writers`` has the writers for Spark, the only module for other packages. In a task, ``columns`` turns Spark's columns
into those of a stream, ``task`` gathers rows into chunks, and ``streamlet_writer`` stores the rows of one streamlet
once, however often a task runs (it has the proof). ``rows`` compares rows, and ``stored_chunks`` reads chunks back.
"""
