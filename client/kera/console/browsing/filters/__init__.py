"""Filter expressions over decoded records, such as ``value.total > 10 and key == "a"``. Pure.

`parsing` makes a tree of a text, or raises `FilterError` with the column; `evaluating` says whether a record fits a
tree. Nothing of an expression is ever run as code. Length, depth and number of parts of an expression are bounded, and
an evaluation visits each part at most once, so a record costs at most a pass over its own values for each part.
"""
