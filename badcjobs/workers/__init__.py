"""Engines at work: planned one per device, fed from one queue, watched, tried again, stopped in order."""
