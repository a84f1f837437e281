"""JSON Schema: what a definition says, and whether all that one allows is allowed by another."""
