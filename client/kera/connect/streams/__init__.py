"""Streams as the source and as the target of a copy, and the journal of a copy into a stream."""
