"""See the package's layers in pyproject.toml."""
