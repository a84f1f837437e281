"""The monitoring of a daemon: metrics, health (``kera.core.base.health``), and the HTTP server for both.

    histogram     latencies, counted on hot paths
    sources       metrics that a daemon's loop collects, and those of its process
    figures       the same metrics for live views, over gRPC
    access        metrics of authentication, denials and quotas
    certificates  health and metrics of the daemon's certificate
    http_server   a small HTTP server that withstands hostile clients
    monitor       all of it for one daemon: /livez, /readyz, /metrics, /metrics/all

State belongs to the daemon's event loop and is read there, in slices; the server has a separate thread, so that it can
report that the loop is stuck.
"""
