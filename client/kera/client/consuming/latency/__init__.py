"""Measurements of readers in streams with a latency constraint; a plug-in of the fetching of chunks."""
