"""Fetches chunks ahead: wanted ranges, the readers of each broker, and the queue of fetched data."""
