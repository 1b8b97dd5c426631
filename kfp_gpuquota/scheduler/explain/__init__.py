"""Why: the sentences for every decision, and why a job waits."""
