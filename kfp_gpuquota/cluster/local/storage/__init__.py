"""What the embedded cluster stores: its SQLite file, the copy in memory, history and retention."""
