"""Shows the records of a stream in pages: chooses the records to examine, those that fit, and their display.

`windows` decides where a page begins and where the next one continues, `rows` extracts records from chunks, `matching`
filters them, `decoding` displays them as text; all without I/O. `reading` asks the cluster, and `registered` its
registry of schemas.
"""
