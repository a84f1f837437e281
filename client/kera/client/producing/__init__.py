"""Producers: records become chunks, chunks get their sequences, and each is stored once.

    producer      the class that users have: puts the parts together
    open_chunks   accepted records and small batches, until their chunk is closed
    sending       requests to brokers
    lanes         the chunks of each streamlet, their sequences, and which are not acknowledged yet
    encoding      payloads of chunks
    outcomes      delivery results of chunks

Each package uses only those below it. ``appender`` uses ``encoding`` alone: one call writes one batch.
"""
