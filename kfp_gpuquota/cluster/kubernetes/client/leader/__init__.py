"""Leader election, and the fence that stops the writes of a process that may have lost its lease."""
