"""JSON Schema: parsing of definitions, and whether one schema allows all values that another allows."""
