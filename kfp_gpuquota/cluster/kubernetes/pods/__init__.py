"""Pods that others create: as the scheduler's jobs, admitted, evicted, and recovered where they do not start.

Not here: pods that the controller creates itself for ElasticJobs (`elasticjob`).
"""
