"""Templates as texts: their keys, what is missing, and that a shell reads back exactly what was filled in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from rooms.cluster import Template, fill, keys_of, list_templates, parse_settings
from rooms.root import BadInput

TEMPLATES = {template.name: template.text for template in list_templates()}
NAMES = ("apptainer-array", "array", "merge", "multinode", "single", "sockeye-array")


def parse(name: str, *given: str, complete: bool = True) -> dict[str, list[str]]:
    return parse_settings(TEMPLATES[name], given, name, complete=complete)


def filled(name: str, *given: str) -> str:
    return fill(TEMPLATES[name], parse(name, *given, complete=False))


def test_the_templates_of_the_design_are_there() -> None:
    assert tuple(sorted(TEMPLATES)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_template_can_be_read_by_bash_and_says_what_it_is_for(name: str) -> None:
    assert subprocess.run(["bash", "-n"], input=TEMPLATES[name], text=True).returncode == 0
    about = Template(name, TEMPLATES[name]).about
    assert 20 < len(about) < 110
    assert max(map(len, TEMPLATES[name].splitlines())) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_every_template_has_its_options_first_and_ends_by_becoming_badcjobs(name: str) -> None:
    lines = TEMPLATES[name].splitlines()
    shell = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(options) < min(shell)  # sbatch reads no further than the first line of shell
    last = max(number for number in shell if not lines[number].startswith(" "))
    assert lines[last].startswith("exec ")
    text = " ".join(lines[last:])
    assert ('"$BADCJOBS" merge "$OUT"' if name == "merge" else '"$BADCJOBS" run "$SOURCE" --out "$OUT"') in text
    assert "#SBATCH --open-mode=append" in lines
    assert any(line.startswith("# EDIT: ") for line in lines)
    if name != "merge":
        assert any(line.startswith("#SBATCH --signal=") and line.endswith("USR1@180") for line in lines)
        assert any("--workers-per-gpu auto" in line for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_template_without_settings_stays_as_it_is(name: str) -> None:
    assert fill(TEMPLATES[name], {}) == TEMPLATES[name]


def test_keys_are_the_names_that_a_reader_sees() -> None:
    names = {key.name for key in keys_of(TEMPLATES["array"])}
    assert names >= {"array", "account", "gpus-per-node", "mem", "time", "source", "out", "badcjobs", "args", "setup"}
    assert "gpus-per-node" not in {key.name for key in keys_of(TEMPLATES["merge"])}


def test_what_is_open_is_named_until_it_is_filled_in() -> None:
    assert Template("", TEMPLATES["array"]).open == ("source", "out")
    assert Template("", TEMPLATES["sockeye-array"]).open == ("account", "source", "out")
    assert Template("", filled("sockeye-array", "account=st-a-1-gpu", "out=x")).open == ("source",)
    assert Template("", TEMPLATES["apptainer-array"]).open == ("image", "source", "out")


def test_an_option_is_replaced_and_one_that_is_commented_out_begins_to_count() -> None:
    text = filled("array", "time=1-00:00:00", "account=st-pi-1", "gpus_per_node=2", "job-name=two words")
    assert "#SBATCH --time=1-00:00:00" in text.splitlines()
    assert "#SBATCH --account=st-pi-1" in text.splitlines()
    assert "#SBATCH --gpus-per-node=2" in text.splitlines()
    assert "#SBATCH --job-name='two words'" in text.splitlines()
    assert "your-account" not in text
    assert len(text.splitlines()) == len(TEMPLATES["array"].splitlines())


@pytest.mark.parametrize(
    "value",
    [
        "it's a}b \"$x\" `id` \\ * 'q'",
        "plain",
        "two words",
        "a}b",
        'a"b',
        "$HOME",
        "`id`",
        "back\\slash",
        "it's",
        "a}b\\}c$(id)\\\\",
        "ä",
        "!x",
    ],
)
def test_the_shell_sees_exactly_the_value_that_was_given(value: str, tmp_path: Path) -> None:
    text = filled("single", f"source={value}", "out=x", f"badcjobs={tmp_path / 'show'}")
    (tmp_path / "show").write_text('#!/bin/sh\nprintf %s "$2"\n')
    (tmp_path / "show").chmod(0o755)
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, env={"PATH": "/usr/bin:/bin"})
    assert done.stdout == value, done.stderr


def test_arguments_and_set_up_lines_are_added_in_their_order(tmp_path: Path) -> None:
    show = tmp_path / "show"
    show.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done; echo $STAGE\n')
    show.chmod(0o755)
    text = filled(
        "single", "source=s", "out=o", f"badcjobs={show}", "args=--max-gpus 2", "args=--engine-arg '--region=a b'",
        "setup=export STAGE=one", "setup=export STAGE=$STAGE-two",
    )  # fmt: skip
    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, env={"PATH": "/usr/bin:/bin"})
    assert done.stdout.splitlines() == [
        "run", "s", "--out", "o", "--workers-per-gpu", "auto", "--max-gpus", "2", "--engine-arg", "--region=a b",
        "one-two",
    ]  # fmt: skip


def test_every_mistake_is_named_at_once_with_the_keys_that_there_are() -> None:
    with pytest.raises(BadInput) as refused:
        parse("sockeye-array", "acount=x", "time", "mem=1G", "mem=2G", "out=", "args=don't")
    said = str(refused.value)
    for words in (
        "has no key 'acount'", "--set time has no value", "mem is given twice", "--set out: ''", "No closing quotation",
        "missing: account", "keys of sockeye-array: job-name, account, array",
    ):  # fmt: skip
        assert words in said
    assert refused.value.fix == "badcjobs template sockeye-array --set mem=1G --set account=…"


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        (("account=a", "account=b"), "--set account=a"),
        (("account=a", "out=two words", "args=--x 1", "args=--y", "account=b"),
         "--set account=a --set 'out=two words' --set 'args=--x 1' --set args=--y"),
        (("colour=red",), "  (shows the script with all its keys)"),
    ],
)  # fmt: skip
def test_the_line_to_try_keeps_what_was_right(settings: tuple[str, ...], fix: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse("array", *settings)
    assert refused.value.fix == f"badcjobs template array {fix}"


def test_a_value_that_would_break_the_line_is_refused() -> None:
    with pytest.raises(BadInput, match="--set account: 'a\\\\nrm'"):
        parse("array", "account=a\nrm")
