"""Records of a stream, a page at a time: which are looked at, which fit, and what they look like.

`windows` decides where a page begins and the next one goes on, `rows` takes records out of chunks, `matching` says
which are wanted, `decoding` makes text of them; all without I/O. `reading` asks the cluster, and
`registered` its registry of schemas.
"""
