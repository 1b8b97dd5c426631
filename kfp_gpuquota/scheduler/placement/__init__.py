"""Selects nodes and devices for tasks, and the cheapest victims on each node."""
