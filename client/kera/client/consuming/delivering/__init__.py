"""Opens fetched chunks, and makes batches, records as Python objects, or data frames of them."""
