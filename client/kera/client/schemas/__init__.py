"""Schemas of values: the coordinator's registry."""
