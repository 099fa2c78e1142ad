"""The command line. Only this package reads the environment, sets up logging and prints errors."""


def main() -> None:
    """Run the ``badcjobs`` program."""
    try:
        from badcjobs.cli.program import run_program

        run_program()
    except KeyboardInterrupt:  # before a handler was installed
        raise SystemExit(130) from None
