"""SQLite: the task database that a task writes and publishes, the job database that merge makes of many."""
