"""The outcome of each chunk, which is set once, and the deliveries that are made from it on demand."""
