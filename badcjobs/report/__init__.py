"""What a job's numbers mean: summarised once, then said as text, JSON or a page."""
