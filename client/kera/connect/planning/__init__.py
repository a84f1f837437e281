"""The decisions of a copy, from its state: nothing here reads or writes anything."""
