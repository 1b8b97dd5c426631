"""Attacks on the embedded cluster and on trainings, as another user of the machine would try them. docs/security.md."""
