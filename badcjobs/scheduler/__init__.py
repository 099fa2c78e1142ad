"""Arrays of tasks: emulated on this machine."""
