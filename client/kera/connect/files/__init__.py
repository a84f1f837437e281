"""Files as the source and as the target of a copy: Parquet, CSV, JSON lines."""
