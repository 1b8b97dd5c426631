"""Kubernetes' objects and ours as narrow structs, and the names of labels and annotations. No logic, no I/O."""
