"""Before a job: check, plan and probe, the rules of sites, and what a submit resolves to."""
