"""Streams as the source and as the target of a copy, and the journal of copies into one."""
