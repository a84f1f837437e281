"""From rows to payloads of chunks: pure functions over Arrow data.

``conforming`` brings batches to a stream's columns, ``partitioner`` decides where rows go, ``payloads`` and
``partition_payloads`` make the bytes of chunks.
"""
