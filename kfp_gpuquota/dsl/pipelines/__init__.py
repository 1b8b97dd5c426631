"""Compiled pipelines: steps are routed through the quota, checked, run on this machine or submitted to a KFP server.

Only this package and the decorators import kfp.
"""
