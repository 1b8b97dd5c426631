"""What commands print: tables, JSON and YAML, plots, and other people's text made harmless for a terminal."""
