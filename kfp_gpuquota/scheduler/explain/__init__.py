"""The user-visible reasons for every decision, and for jobs that wait."""
