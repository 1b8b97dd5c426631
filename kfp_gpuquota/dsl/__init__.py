"""What a pipeline author touches, and what the step runs in place of the author's code.

Belongs here: the decorators and the pure functions on compiled pipelines behind them (these alone import kfp); the
launcher, which is what a decorated step runs; the worker's side of it, which is the standard library only.
Does not: deciding where and when a job runs, and starting its processes (scheduler, cluster).
"""
