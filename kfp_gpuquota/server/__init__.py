"""HTTP: jobs, projects, nodes, logs and membership, over a cluster that it knows only as a protocol.

Belongs here: routes, authentication, the OpenAPI document, the client. Does not: what a request does (cluster).
"""
