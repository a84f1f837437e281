"""Consumers that share streams: who holds which groups, how far they are, who is gone (thesis 6.2.3).

``consumer_group`` decides, with ``members`` and ``progress`` as its parts, and waits for nothing; ``service`` answers
remote calls and stores what has changed; ``uses`` says which consumer groups nobody uses any more. How records are read
is between consumers and brokers.
"""
