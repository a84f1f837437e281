"""Schemas of Protobuf: what a definition says, and whether one reads what was written with another."""
