"""The user's options of a query in ``option(…)``, checked before any connection is made.

``reading`` and ``writing`` have the options of a query as typed values; ``subscription`` says which streams are read,
``places`` how a place is written, ``names`` what options are called and ``values`` how their texts are read.
``planning`` decides what a place means in a stream, and how much a micro-batch takes.
"""
