"""The web page: HTML and SVG that the server renders, and streams of what changed on them.

Belongs here: access to the pages, their content, their live updates. Does not: where the data come from (`source` is
the protocol, each kind of cluster implements it), what an action does (cluster), the API under /v1 (server).
"""
