"""`python3 -m kfp_gpuquota.dsl.launcher`: what a routed step runs; it submits the job, streams its log, fetches outputs.

It starts in a quarter of a second: neither kfp nor an asynchronous framework is imported.
"""
