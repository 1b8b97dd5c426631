"""Pods of other controllers: their jobs in the scheduler, admission, eviction, and recovery if they do not start.

Not here: pods that this controller creates for ElasticJobs (`elasticjob`).
"""
