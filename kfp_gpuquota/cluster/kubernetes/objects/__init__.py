"""Structs of Kubernetes' and this project's objects, and the names of labels and annotations. No logic, no I/O."""
