"""Remote calls: what a broker is asked, over frames, gRPC and the push channel.

``service`` has all methods; ``write`` appends (``taking``: usual chunks, and several requests at once, in C;
``carrying``: on to their level), ``fetch`` and ``read_sessions`` answer pulling readers (``outgoing`` bounds what of
the memory their answers hold), ``lookups`` finds places, ``descriptions`` and ``thesis_api`` say what there is,
``cursors`` commits and truncates, ``push`` and ``push_server`` tell readers on this host where chunks lie
(``following`` is what both ways of reading share). ``limits`` bounds what each request may have. Transports are
``kera.core.rpc``'s business.
"""
