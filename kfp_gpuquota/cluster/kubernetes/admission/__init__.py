"""The webhook: reviews of new pods, its server and its certificates. A review is pure; only `server` does I/O."""
