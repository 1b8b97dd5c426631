"""The scheduler's state: jobs, queues, nodes and device assignments, indexed, changed only by events."""
