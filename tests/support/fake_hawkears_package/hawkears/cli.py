"""The command line, in the shape of a click group: ``cli.commands["analyze"].main(args, standalone_mode=False)``."""

from __future__ import annotations

import argparse

from hawkears.commands._analyze import _analyze_cmd


class UsageError(Exception):
    """What click raises for a wrong option."""

    def format_message(self) -> str:
        return str(self)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"Invalid value: {message}")


class Command:
    """One command of the group."""

    callback = staticmethod(_analyze_cmd)

    def main(self, args: list[str], prog_name: str, standalone_mode: bool) -> None:
        parser = _Parser(add_help=False, allow_abbrev=False)
        for name in ("--region", "--date", "--cfg", "--label"):
            parser.add_argument(name)
        for name in ("--lat", "--lon"):
            parser.add_argument(name, type=float)
        parser.add_argument("--threads", dest="num_threads", type=int)
        parser.add_argument("--models", dest="max_models", type=int)
        parser.add_argument("--start", dest="start_seconds_str")
        parser.add_argument("-m", "--min_score", type=float)
        options, unknown = parser.parse_known_args(args)
        if unknown:
            raise UsageError(f"No such option: {unknown[0]}")
        self.callback(**vars(options))


class Group:
    """``hawkears`` itself."""

    commands = {"analyze": Command()}  # noqa: RUF012


cli = Group()
