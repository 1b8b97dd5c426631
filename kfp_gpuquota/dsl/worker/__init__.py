"""What each worker of a step starts with: the standard library only, for it runs in the step's own image."""
