"""Epochs: every reader gets the same records in the same batches, at any time (StreamMine3G 3.6.4 and chapter 4).

`marks` decides which epoch a chunk belongs to, and `merging` which epoch is closed: both pure. `entry_reader` reads one
entry of a streamlet, `reader` puts the entries together, `epoch` is the result. `sorting` puts the rows of an epoch in
order, and `ordered_consumer` delivers them in that order.
"""
