"""The connection to the coordinator, and the process group of each generation of workers.

Not here: what a worker does when its generation changes (`loop.member`).
"""
