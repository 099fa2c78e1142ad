"""The Python interface; import its names from ``badcjobs``."""
