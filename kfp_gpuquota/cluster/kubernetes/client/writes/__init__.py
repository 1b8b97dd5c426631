"""Writes to the API server: the queue, statuses and events."""
