"""Producers: records become chunks, chunks get their sequences, and each is stored once.

    producer      what users have: puts the parts together
    open_chunks   what is accepted, until its chunk is closed
    sending       requests to brokers
    lanes         the chunks of each streamlet, their sequences, and what is not acknowledged
    encoding      payloads of chunks
    outcomes      what becomes of them

Each uses those below it only. ``appender`` writes without any of this but ``encoding``, a call for a batch.
"""
