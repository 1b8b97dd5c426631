"""Reconciles ElasticJobs: their records, workers' pods, membership, time limits and status."""
