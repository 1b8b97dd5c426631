"""On which nodes and devices tasks go, and what could be taken from whom to make room."""
