"""The command line: arguments → one call. Only here are the environment read, logging set up, errors printed."""


def main() -> None:
    """Run the ``badcjobs`` program."""
    try:
        from badcjobs.cli.program import run_program

        run_program()
    except KeyboardInterrupt:  # before anybody listened for it
        raise SystemExit(130) from None
