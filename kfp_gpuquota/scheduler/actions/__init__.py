"""One scheduling cycle: allocate what is idle, reclaim and preempt, consolidate, and lend what is left."""
