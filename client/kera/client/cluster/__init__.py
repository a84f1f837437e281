"""A cluster as the SDK sees it: where streams are, connections to daemons, and how one broker is asked and read from.

``cluster`` knows streams and routes and asks coordinators and brokers; ``retry`` says what is tried again, ``batches``
how much goes into a request, ``intervals`` which broker has which groups. ``locality``, ``push``, ``fetch`` and
``read_session`` bring chunks from one broker. Which chunks are wanted is left to ``consuming``.
"""
