"""Records that survive a coordinator: by key, durable, each with a version; and the right to write them.

``metadata`` defines the guarantees of every store; ``lmdb_store``, ``zookeeper_store`` and ``memory_store`` implement
them. ``ledger`` is the mirror in memory that others read. ``leadership`` and ``zookeeper_election`` determine the
leader,
``metadata_copy`` copies all records to a file and back, and ``numbers`` are never given twice. Others use `Ledger`,
`MetadataStore` and the errors. The writers of records define what they mean.
"""
