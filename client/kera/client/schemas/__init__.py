"""Schemas of values: the registry that the coordinator keeps."""
