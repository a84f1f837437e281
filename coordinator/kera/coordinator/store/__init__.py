"""Records that survive a coordinator: by key, durable, each with a version; and the right to write them.

``metadata`` says what every store promises, ``lmdb_store``, ``zookeeper_store`` and ``memory_store`` keep it;
``ledger`` is the mirror that others read, ``leadership`` and ``zookeeper_election`` say who leads, ``metadata_copy``
copies all to a file and back, ``numbers`` are never given twice. Others use `Ledger`, `MetadataStore` and the errors;
what records mean is left to those who write them.
"""
