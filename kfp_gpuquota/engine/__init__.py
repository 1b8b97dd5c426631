"""The life of jobs on any cluster: their records, what follows from an event, and what is to be done then.

A kind of cluster implements the protocols in `protocols.py`. Nothing here starts a process, opens a socket or reads a
clock.
"""
