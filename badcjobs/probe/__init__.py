"""Which length to try next, and what the trials say in the end (pure)."""
