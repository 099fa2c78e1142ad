"""Readings on a fixed grid, gaps written as gaps, in a process of their own that never takes the job down."""
