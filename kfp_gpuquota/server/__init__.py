"""HTTP: jobs, projects, nodes, logs and membership, over a cluster that implements the protocol `backend`.

Belongs here: routes, authentication, the OpenAPI document, the client. Does not: what a request does (cluster).
"""
