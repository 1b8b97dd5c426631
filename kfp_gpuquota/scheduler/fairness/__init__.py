"""How much each queue may have, and whose job is considered next."""
