"""``kera console``: a web application that shows a cluster, and changes it if that is allowed.

The console makes its pages from templates; there is no build step, and a browser needs nothing from elsewhere. `serve`
runs it, `application` is for callers with their own server, such as tests.

Like any other client, the console uses the cluster only through `kera.client`. `web` is shared by all pages (access,
parameters, errors, design), `watching` is the memory between two requests, `browsing` reads and decodes records, and
`pages` has the pages. `limits` has the limits of all of them.
"""
