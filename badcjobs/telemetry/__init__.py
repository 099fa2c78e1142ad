"""Record device readings at fixed intervals, and gaps as gaps, in a separate process that never stops the job."""
