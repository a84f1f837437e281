"""The outcome of each chunk, which is told once, and the deliveries that are made of it on demand."""
