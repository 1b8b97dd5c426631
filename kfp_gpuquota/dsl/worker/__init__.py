"""The start programs of a step's workers. They use only the standard library, because they run in the step's image."""
