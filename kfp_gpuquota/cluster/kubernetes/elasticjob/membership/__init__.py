"""The membership service for ElasticJobs: its server, workers' credentials, and reports to the records."""
