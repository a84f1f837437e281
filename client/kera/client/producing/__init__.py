"""Producers: records become chunks, chunks get their sequences, and each is stored once.

``producer`` is what users have; ``accumulator`` gathers records, ``encoding`` makes chunks of them, ``lane`` gives
sequences and keeps what is not acknowledged, ``stream_writer`` and ``routes`` know where chunks go, ``sender`` sends to
one broker. ``appender`` writes without any of this, a call for a batch.
"""
