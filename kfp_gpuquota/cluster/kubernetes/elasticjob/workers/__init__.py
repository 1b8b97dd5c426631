"""Workers' pods: built, created, watched, deleted, and given up where they do not start."""
