"""The pending chunks of one producer: a ``lane`` for each streamlet, and a ``bundle`` of chunks of many lanes."""
