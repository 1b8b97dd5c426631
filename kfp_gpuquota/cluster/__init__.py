"""Executes plans: the embedded cluster on one machine or over Ray, Kubernetes, and how a client finds either.

Belongs here: processes, files, databases, API servers. Does not belong here: decisions (scheduler, membership).
"""
