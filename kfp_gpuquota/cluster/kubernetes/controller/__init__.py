"""The controller's process: its cache of the cluster, planning on change, status, metrics. The top of this package."""
