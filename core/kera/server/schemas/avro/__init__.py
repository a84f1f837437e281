"""Schemas of Avro: parsing of definitions, and whether one schema can read data written with another."""
