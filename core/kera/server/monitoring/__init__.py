"""How a daemon is watched: health, metrics, and the HTTP server for both.

    build         which program this is
    health        what a daemon says about itself: whether it can do its work, and if not, why
    histogram     latencies, counted on hot paths
    sources       metrics as a daemon's loop collects them, and those of its process
    figures       the same for whoever watches live, over gRPC
    http_server   a small server of HTTP that bears whoever connects
    monitor       all of it for one daemon: /livez, /readyz, /metrics, /metrics/all

State belongs to the daemon's event loop and is read there, in slices; the server has a thread of its own, so that it
can tell of a loop that is stuck.
"""
