"""The embedded cluster's daemon on the nodes of a Ray cluster (docs/ray.md).

config.py       which Ray cluster, and how          host.py      the actor above a worker's shim, on the worker's node
messages.py     between daemon and bridge           hosts.py     the bridge's actors: held, warm, discovered again
runtime.py      the daemon's side: `WorkerRuntime`  bridge.py    the process that is connected to Ray
nodes.py        Ray's nodes as the plan's, fencing  ownership.py one daemon for each Ray cluster
workers.py      what a node needs to run a worker   membership.py the membership service over TLS
coordinator.py  that service as a program, for Ray Train without the daemon (elastic_runtime.integrations.ray)

Only bridge.py, host.py, hosts.py and ownership.py import ray. The daemon never does: Ray's client ends its process when
it loses its cluster for a minute, and calls of it block, so it lives in a process of its own that may die at any time.
"""
