"""Chunks are fetched ahead: the ranges that are wanted, the readers of each broker, and the queue of what has come."""
