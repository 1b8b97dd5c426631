"""Gradients over the workers: buckets, fast and exact sums, and the few numbers that travel with them."""
