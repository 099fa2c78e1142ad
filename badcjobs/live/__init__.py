"""During a job: one snapshot, drawn in a terminal (monitor) or served to a browser (serve)."""
