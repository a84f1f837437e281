"""Epochs: the same records in the same batches, whoever reads and however late (StreamMine3G 3.6.4 and chapter 4).

`marks` says which epoch a chunk belongs to, and `merging` which epoch is closed: both pure. `entry_reader` reads one
entry of a streamlet, `reader` puts the entries together, `epoch` is what comes out. `sorting` puts the rows of an epoch
in order, and `ordered_consumer` gives them one after the other.
"""
