"""`python3 -m kfp_gpuquota.dsl.launcher`: what a routed step runs. It submits the job, streams its log, ends with it.

It starts in a quarter of a second: neither kfp nor an asynchronous framework is imported.
"""
