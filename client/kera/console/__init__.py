"""``kera console``: a web application that shows a cluster, and changes it where it may.

Pages are made here, of templates; there is no build step, and a browser needs nothing that it does not get from here.
`serve` runs it, `application` is the same for who has a server already, as tests do.

It knows the cluster as any other client does: everything here goes through `kera.client`. `web` is what all pages share
(who may ask, parameters, errors, how things look), `watching` what the console remembers between two requests,
`browsing` reads and decodes records, and `pages` are the pages. What none of them may exceed is in `limits`.
"""
