"""Fair shares and quotas of the queues, and the order in which pending jobs are considered."""
