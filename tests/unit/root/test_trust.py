"""Trust: a file that the user did not name can name programs only if no other user can have written it."""

import os
import re
import subprocess

import pytest
from rooms.root import SETTINGS, BadInput, Project, Trust
from support.cases import read_data
from support.needs import missing

CASES = re.findall(r"=== (.*)\n((?:(?!===).*\n)*)", read_data("trust_cases.txt"))
PREPARE = """
mkdir -p ../.config/badcjobs
TRUSTED=$(realpath ../.config/badcjobs/trusted)
touch $TRUSTED
printf '[run]\\nengine_prefix = "./x"\\nhawkears_python = "bin/python"\\n' > badcjobs.toml
chown 1234 .. . badcjobs.toml $TRUSTED
"""


def test_a_file_names_programs_only_if_no_other_user_can_change_it(tmp_path, pages, caplog):
    if os.geteuid() != 0:
        missing("root", "only root can give files to other users")
    lines = []
    for number, (name, script) in enumerate(CASES):
        folder = tmp_path / str(number) / "project"
        folder.mkdir(parents=True)
        subprocess.run(["bash", "-euc", f"{PREPARE}{script}"], cwd=folder, check=True)
        trust = Trust.read(1234, {"HOME": str(folder.parent)}, "badcjobs run --config ''")
        try:
            answer = f"--config={Project.read([], folder, trust, ('run', 'submit', 'alerts')).word}"
        except BadInput as error:
            answer = str(error)
        lines += [f"=== {name}", answer.replace(str(folder.parent), "HOME")]
        lines += [f"warning: {text}".replace(str(folder.parent), "HOME") for text in caplog.messages]
        assert Project.read([], folder, trust).file, "for commands that run nothing"
        caplog.clear()
    pages({"cases.txt": "\n".join(lines)})


def test_it_is_decided_for_every_key_whether_it_names_programs(pages):
    keys = [(f"{table}.{key}", setting.runs) for table, keys in SETTINGS.items() for key, setting in keys.items()]
    pages({"keys.txt": "\n".join(f"{key:<26}{'runs' if runs else ''} {' '.join(runs)}".rstrip() for key, runs in keys)})


def test_a_file_is_judged_as_it_was_when_it_was_read(tmp_path):
    read, path = tmp_path / "read.toml", tmp_path / "badcjobs.toml"
    read.touch()
    read.chmod(0o666)
    path.touch()
    trust = Trust(os.geteuid(), tmp_path / "trusted", "", (str(path),))
    assert trust.check(path, path.stat(), {"run.command": "x"})
    with pytest.raises(BadInput):
        trust.check(path, read.stat(), {"run.command": "x"})
