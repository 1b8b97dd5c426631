"""`python3 -m kfp_gpuquota.dsl.launcher`: submits the job of a routed step, streams its log and waits for its end.

It starts in a quarter of a second: neither kfp nor an asynchronous framework is imported.
"""
