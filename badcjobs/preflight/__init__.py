"""Judges a job before it is submitted: facts and a site's rules → findings, each with the line that fixes it. Pure."""
