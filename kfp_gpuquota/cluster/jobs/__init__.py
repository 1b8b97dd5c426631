"""Records of jobs and workers, and what follows from their changes, for every kind of cluster."""
