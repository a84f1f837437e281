"""The chunks of one producer on their way: a ``lane`` for each streamlet, and a ``bundle`` of many lanes' chunks."""
