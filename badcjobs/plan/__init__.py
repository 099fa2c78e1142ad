"""Lengths, a measured speed and a site's caps → array tasks, waves and the time they take. Pure."""
