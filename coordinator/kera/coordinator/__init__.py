"""The coordinator: which streams there are, who owns their streamlets, who is alive (thesis 6.3.1).

Reading order: ``coordinator`` (what each operation does, and when it counts), ``catalog`` and ``membership`` (what it
knows), ``placement`` and ``validation`` (what it decides), ``ledger``, ``metadata`` and ``lmdb_store`` (what survives
it), ``brokers`` (what it tells others), ``service`` and ``__main__`` (the process).
"""
