"""What the scheduler reasons about: jobs, queues, nodes and who holds what, indexed, changed by events only."""
