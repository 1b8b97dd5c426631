"""Kubernetes client of the command line and the launcher, with the user's own credentials."""
