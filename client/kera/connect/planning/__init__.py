"""What a copy does next, from what it knows: nothing here reads or writes anything."""
