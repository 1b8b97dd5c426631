"""Scripts that run twice: plain, and with elastic_runtime at size 1. What they leave behind must be the same."""
