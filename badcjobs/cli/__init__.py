"""The command line: arguments → one call. Only here are the environment read, logging set up, errors printed."""


def main() -> None:
    """Run the ``badcjobs`` program."""
    from badcjobs.cli.program import run_program

    run_program()
