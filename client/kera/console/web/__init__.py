"""The common parts of all pages: access, parameters, errors, and the design."""
