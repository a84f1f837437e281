"""The decisions of a copy, from its state, without I/O."""
