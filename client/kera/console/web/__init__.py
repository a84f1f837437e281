"""Shared by all pages: access, parameters, errors, and the design."""
