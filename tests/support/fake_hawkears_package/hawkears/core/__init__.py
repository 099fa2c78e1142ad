"""The inside, as far as anybody looks."""
