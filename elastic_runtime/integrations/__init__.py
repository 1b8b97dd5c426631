"""Integrations with libraries that own the training loop. Each module needs its library and is imported by name."""
