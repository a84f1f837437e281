"""Chunks that have come are opened, and become batches, records as Python objects, or data frames."""
