"""A Kubernetes cluster for the command line and the launcher: the same calls, as the user's own identity."""
