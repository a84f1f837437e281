"""The broker's remote calls, over frames, gRPC and the push channel.

``service`` lists all methods. ``write`` appends chunks: ``taking`` appends usual chunks and several requests at once in
C, and ``carrying`` brings chunks to their durability level. ``fetch`` and ``read_sessions`` answer readers that pull,
and ``outgoing`` bounds the memory that these answers hold. ``push`` and ``push_server`` tell readers on this host where
chunks lie in memory. ``following`` is shared by both ways of reading. ``lookups`` finds places in the log,
``descriptions`` and ``thesis_api`` describe its content, and ``cursors`` commits and truncates. ``limits`` bounds each
request. ``kera.core.rpc`` provides the transports.
"""
