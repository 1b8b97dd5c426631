"""The controller's process: cache of the cluster, planning on changes, status and metrics. The top of this package."""
