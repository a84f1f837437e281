"""The latency of records, hop by hop: how it is measured and summed up. No I/O.

`hop.Hop` names the parts of a record's way. A `sample.Sample` has the times of one hop for many chunks: their count,
sum, maximum and histogram (`buckets`). Samples can be merged, so senders report them once per interval, and receivers
sum them up; a `window.Running` keeps those of a recent window. `report` converts samples to messages and back, and
checks the messages of peers. `offset.PeerClockOffset` estimates how far two clocks are apart.
"""
