"""Before a job: check, plan and probe."""
