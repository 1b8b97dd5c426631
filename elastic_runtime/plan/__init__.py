"""The plan of an epoch: order of samples, batches, micro-batches, position. Pure, and equal on every worker."""
