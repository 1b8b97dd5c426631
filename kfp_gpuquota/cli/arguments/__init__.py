"""Command-line arguments: shared options, parsers of names and amounts, completion, and messages about refusals."""
