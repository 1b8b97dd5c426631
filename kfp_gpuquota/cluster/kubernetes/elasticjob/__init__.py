"""The ElasticJob's life: its record, its workers' pods, their membership, time limits and status."""
