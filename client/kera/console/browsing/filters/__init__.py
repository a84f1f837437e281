"""Filter expressions over decoded records, such as ``value.total > 10 and key == "a"``. Pure.

`parsing` turns a text into a tree, or raises `FilterError` with the column; `evaluating` decides whether a record fits
a tree. No part of an expression ever runs as code. Length, depth and number of parts of an expression are bounded, and
an evaluation visits each part at most once. So a record costs at most one pass over its values per part.
"""
