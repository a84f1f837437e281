"""Measurements of readers in streams with a latency constraint. They are plugged into the fetching of chunks."""
