"""A demonstration of KerA with Spark, to run and to read: ``make demo``, or ``python -m demo``.

`__main__` tells the story from top to bottom; `data` loads the data to replay, `feeder` writes them into KerA, `job` is
the Spark query that reads them, `check` computes the right answer, and `screen` shows the progress.
"""
