"""Kubernetes' objects as the scheduler's nodes, tasks and amounts, and decisions as requests to the API server. Pure.

Not here: which object is watched and when it is converted (`controller`), and quotas (`quota`).
"""
