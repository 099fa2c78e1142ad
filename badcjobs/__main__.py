"""``python -m badcjobs``."""

from badcjobs.cli import main

main()
