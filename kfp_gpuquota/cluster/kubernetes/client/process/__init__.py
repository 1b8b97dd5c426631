"""What each process of an installation has: signals, probes, logs, and an event loop that no computation blocks."""
