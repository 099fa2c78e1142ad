"""Task databases → one job database: found, examined, mended, copied, counted."""
