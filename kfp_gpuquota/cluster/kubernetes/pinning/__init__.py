"""Which pods are pinned to their planned node, and the reservations of those that are not.

One rule for pods of other controllers, workers of ElasticJobs and workers of Ray clusters. Not here: which constraints
the plan does not model (`convert.unmodelled`), and what happens to a pinned pod that cannot be bound (`pods.recovery`).
"""
