"""Consumers: of a range of a stream, or of what a consumer group leaves to each of its members.

``consumer`` and ``group_consumer`` are what users have; ``feed`` and ``group_feed`` have ranges pushed or pulled,
``group_discovery`` finds groups to be read, ``keep_alive`` says that a member lives, ``records`` and ``values`` make
Python objects of chunks. How a broker is read from is ``cluster``'s business.
"""
