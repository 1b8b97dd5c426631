"""Converts Kubernetes objects to the scheduler's types, and decisions to requests to the API server. Pure.

Not here: watches and the order of conversions (`controller`), and quotas (`quota`).
"""
