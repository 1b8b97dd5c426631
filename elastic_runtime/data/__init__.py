"""The prepared loaders: which samples this worker reads, through the user's own DataLoader."""
