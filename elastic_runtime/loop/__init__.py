"""The training loop: the job as a script sees it, its global steps, and how this worker joins, repeats and leaves."""
