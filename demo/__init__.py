"""A demonstration of KerA with Spark, to run and to read: ``make demo``, or ``python -m demo``.

`__main__` tells the story from top to bottom; `data` is what is replayed, `feeder` writes it into KerA, `job` is the
Spark query that reads it, `check` knows the right answer, and `screen` shows how it goes.
"""
