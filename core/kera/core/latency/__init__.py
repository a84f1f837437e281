"""How long records take on their way, hop by hop: what is measured, and how it is summed up. Nothing here does I/O.

`hop.Hop` names the parts of the way. A `sample.Sample` is what one of them took, of many chunks: how often, altogether,
at most, and how many of them so long (`buckets`). Samples merge, so they can be reported once per interval and summed
up by whoever gets them; a `window.Running` keeps those of the last so many seconds. `report` makes messages of samples
and samples of messages; what a peer sends is checked there. `offset.ClockOffset` is how far two clocks are apart.
"""
