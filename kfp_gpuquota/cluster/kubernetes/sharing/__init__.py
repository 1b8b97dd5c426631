"""Shared GPUs: the controller's reservations, and the memory agent of each node."""
