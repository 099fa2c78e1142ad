"""A stand-in ``dcgmi`` for a folder on the search path: ``discovery -l`` and ``dmon``, as DCGM 3 and 4 write them.

It prints whatever stands in its files, a round every 50 ms whatever -d says.
"""

from pathlib import Path

from support.stand_ins import install

PROGRAM = """#!/bin/sh
cd {folder}
echo "$$ $*" >> starts
if [ "$1" = discovery ]; then cat discovery; exit $(cat code); fi
if [ -e refusal ]; then cat refusal; exit 226; fi
printf '#Entity   SMACT        SMOCC        \\nID                                  \\n'
while cat rows 2>/dev/null; do echo >> rounds; sleep 0.05; done
exit 1
"""
LINE = f"+--------+{'-' * 70}+\n"
ROW = (
    f"| {{0:<6}} | {'Name: Tesla V100-SXM2-32GB':<69}|\n|        | {'PCI Bus ID: 00000000:18:00.0':<69}|\n"
    f"|        | Device UUID: {{1:<56}}|\n{LINE}"
)


class FakeDcgmi:
    """The program in a folder of its own; ``listed``: DCGM's number of a device → its UUID."""

    def __init__(self, folder: Path, listed: dict[str, str], **files: str | None) -> None:
        self._folder = folder
        install(folder / "dcgmi", PROGRAM.format(folder=folder))
        rows = [ROW.format(number, uuid) for number, uuid in listed.items()]
        discovery = f"{len(rows)} GPUs found.\n{LINE}{''.join(rows)}0 NvSwitches found.\n"
        self.write(**{"discovery": discovery, "code": "0", "rows": "", "starts": "", "rounds": "", **files})

    def write(self, **files: str | None) -> None:
        """Change what it prints from its next round on; without ``rows`` it ends, with a ``refusal`` it says that."""
        for name, text in files.items():
            (self._folder / "new").write_text(text or "")
            (self._folder / "new").replace(self._folder / name)
            if text is None:
                (self._folder / name).unlink()

    def starts(self) -> list[list[str]]:
        """Tell how it was started so far: pid and arguments."""
        return [line.split() for line in (self._folder / "starts").read_text().splitlines()]

    def rounds(self) -> int:
        """Tell how many rounds it has ended."""
        return len((self._folder / "rounds").read_text())
