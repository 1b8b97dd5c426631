"""Where training loops are not one's own. Each module needs its library, and is imported by name."""
