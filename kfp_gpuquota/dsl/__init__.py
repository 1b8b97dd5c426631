"""The decorators for pipeline authors, and the launcher that a decorated step runs instead of the author's command.

Belongs here: the decorators and the pure functions on compiled pipelines behind them (only these import kfp); the
launcher; the worker's start program, which uses the standard library only.
Does not belong here: deciding where and when a job runs, and starting its processes (scheduler, cluster).
"""
