"""Commands about one's own work: submit, watch, read logs of, change and end jobs."""
