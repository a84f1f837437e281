"""The SDK's view of a cluster: where streams are, connections to daemons, and requests to and reads from one broker.

``cluster`` knows streams and routes and asks coordinators and brokers; ``retry`` decides what to retry, ``batches`` how
much goes into a request, ``intervals`` which broker has which groups. ``locality``, ``push``, ``fetch`` and
``read_session`` fetch chunks from one broker. ``consuming`` decides which chunks.
"""
