"""What reaches a terminal, a log or a file: letters only, bars that fit, and no file of anybody's data."""

import json
import logging
import os
import re
import shlex
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import cli
from rooms.cli import BY_NAME, PAGES, app, guide, make_parser, read_topic
from rooms.root import BadInput, folder
from rooms.task import DeviceWorkNow, TaskProgress
from support.audio import make_wav
from support.brief import page

RED, TURNED, LETTERS = "\x1b[31mred", "a\u202eb\u200f", "Ñandú 鳥 птица 🐦 ×"


def logged(message, *args, error=None):
    trouble = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("badcjobs", logging.WARNING, "task.py", 1, message, args, trouble)
    return cli.SafeFormatter("12:00 %(levelname)s %(message)s").format(record)


def test_text_from_files_steers_no_terminal_and_forges_no_line():
    said = rf"12:00 WARNING \x1b[31mred failed (a\u202eb\u200f) {LETTERS}"
    assert logged("%s failed (%s) %s", RED, TURNED, LETTERS) == said
    assert logged("%s", "\x9b2J\r\x07\x7f\t") == "12:00 WARNING \\x9b2J\\r\\x07\\x7f\t"
    assert logged("%s failed", "a\n12:00 INFO    done") == "12:00 WARNING a\n    | 12:00 INFO    done failed"
    try:
        raise ValueError(f"no header\r\nin {RED}")
    except ValueError as error:
        first, *others = logged("on_alert failed", error=error).splitlines()
    assert (first, others[0]) == ("12:00 WARNING on_alert failed", "    | Traceback (most recent call last):")
    assert others[-2:] == ["    | ValueError: no header", r"    | in \x1b[31mred"]
    painted = "july: \x1b[32mall done\x1b[0m \x1b[2J\tx\n"
    assert cli.safe_lines(painted, painted=True) == "july: \x1b[32mall done\x1b[0m \\x1b[2J\\tx\n"
    assert cli.safe_lines(painted) == "july: \\x1b[32mall done\\x1b[0m \\x1b[2J\\tx\n"
    assert cli.safe_lines(painted, tabs=True) == "july: \\x1b[32mall done\\x1b[0m \\x1b[2J\tx\n"
    error = BadInput(f"a\nb {RED}", why=f"line 3: {RED}\nline 4: {TURNED}", fix="sed -n 3p x.csv")
    assert cli.safe_error(error).splitlines() == [
        r"badcjobs: error: a\nb \x1b[31mred", r"  why: line 3: \x1b[31mred", r"       line 4: a\u202eb\u200f",
        "  try: sed -n 3p x.csv",
    ]  # fmt: skip


@settings(max_examples=30)
@given(st.text())
def test_a_json_document_says_the_same_with_every_sign_spelled_out(text):
    said = cli.safe_json(json.dumps([text, RED, TURNED, "\x7f\x9b\U000e0041", LETTERS], indent=2, ensure_ascii=False))
    assert json.loads(said) == [text, RED, TURNED, "\x7f\x9b\U000e0041", LETTERS]
    assert all(line.isprintable() for line in said.split("\n"))
    assert f'"{LETTERS}"' in said


def test_a_wrong_interval_is_refused(monkeypatch):
    assert cli.poll_s(2.5) == 2.5
    for text, seconds in (("0.1", 0.1), ("3", 3.0), ("", 2.5)):
        monkeypatch.setenv("BADCJOBS_POLL_S", text)
        assert cli.poll_s(2.5) == seconds
    for wrong in ("0", "-1", "1.2.3", "x", "inf"):
        monkeypatch.setenv("BADCJOBS_POLL_S", wrong)
        with pytest.raises(BadInput, match="is not a number of seconds"):
            cli.poll_s(2.5)


def test_commands_to_paste_have_the_settings_file_of_this_one_where_it_is_accepted(monkeypatch):
    for typed, own, another in (
        ("check m.csv --config run.x=1", "submit m.csv --config run.x=1 --wait", "merge july"),
        ("--config a.toml --debug check m.csv", "--config a.toml submit m.csv --wait", "--config=a.toml merge july"),
        ("--config=a.toml check -- --x", "--config=a.toml submit --wait -- --x", "--config=a.toml merge july"),
        ("check --config= -- --config b", "submit --config= --wait -- --config b", "--config= merge july"),
    ):
        monkeypatch.setattr("sys.argv", ["badcjobs", *typed.split()])
        assert " ".join(cli.this_command("--wait", name="submit")) == f"badcjobs {own}"
        assert " ".join(map(str, cli.other_command("merge", Path("july")))) == f"badcjobs {another}"


progress_of = partial(TaskProgress, start_up_s=0.0, failed=0, retrying=0, devices=())
HALF_WAY = progress_of(480, 960, audio_done_s=14_400.0, elapsed_s=130.0, start_up_s=10.0)
GPU_0 = DeviceWorkNow("GPU 0  Tesla V100-SXM2-32GB", 320, 9600.0, ("site01/site01_c000",))
GPU_1 = DeviceWorkNow("GPU 1  Tesla V100-SXM2-32GB", 160, 4800.0, ("site01/site01_c001",))
WORK = replace(HALF_WAY, devices=(GPU_0, GPU_1))
WAITS = replace(HALF_WAY, chunks_settled=957, failed=2, retrying=3, devices=(replace(GPU_0, working_on=()),))
TWINS = tuple(replace(GPU_0, label=f"GPU MIG-0123456789abcdef-0123456789ab{n}") for n in range(2))
BARS = {
    "half-way": WORK, "idle": replace(HALF_WAY, devices=(GPU_0, GPU_1, DeviceWorkNow("GPU 2", 0, 0.0, ()))),
    "twins": replace(HALF_WAY, devices=TWINS),
    "start": progress_of(0, 960, 0.0, 5.0, devices=(DeviceWorkNow("GPU 0", 0, 0.0, ()),)),
    "first": progress_of(1, 961, 30.0, elapsed_s=61.0, start_up_s=60.0),
    "waits": WAITS, "one is fresh": replace(WAITS, retrying=2),
    "all fail": progress_of(4, 6, 0.0, 8.0, failed=4, retrying=1, devices=(replace(GPU_0, done=0, audio_done_s=0.0),)),
    "many": replace(HALF_WAY, devices=tuple(DeviceWorkNow(f"GPU {n}", 1, 1.0, ()) for n in range(16))),
    "evil": replace(HALF_WAY, devices=(DeviceWorkNow("GPU 0  \x1b[2J", 1, 1.0, ("\x1b[31mred", "a\nb", "Ñandú",
        "鳥" * 60)),)),
}  # fmt: skip


def test_bars_say_how_far_each_device_is_in_terminals_of_every_width(pages):
    said = {}
    for columns in (20, 40, 70, 100, 200):
        lines = []
        for name, work in BARS.items():
            rows = cli.bar_rows(work, columns=columns, lines=10)
            lines += [f"{name}:", *(f"    {row.plain}" for row in rows)]
        said[f"{columns}.txt"] = "\n".join(lines)
    rows = [row for work in BARS.values() for row in cli.bar_rows(work, columns=100, lines=24, ascii_only=True)]
    said["ascii.txt"] = "\n".join(row.plain for row in rows)
    pages(said)
    assert said["ascii.txt"].isascii()


@settings(max_examples=60)
@given(st.integers(1, 250), st.integers(1, 60), st.sampled_from([*BARS.values()]))
def test_every_line_of_bars_fits_the_terminal(columns, lines, work):
    rows = cli.bar_rows(work, columns=columns, lines=lines)
    assert all(row.cell_len < max(columns, 2) for row in rows)
    assert columns < 20 or rows[-1].plain.startswith("all ")


TARGETS = """july/run.toml july/job.sqlite july/submitted.json sent/submitted.json link.html
    july/tasks/4821_0.r0.gpu1.log july/tasks/new.html july/../july/tasks/deep/new.html sent/tasks/4821_0.r0.log
    july/logs/4821.json
    emulated/logs/4821_1.out july.csv costs.toml hard-link.html site.html site.flac all.md
    july/report.html new.md elsewhere/run.toml elsewhere/tasks/a.md july/july.prom july elsewhere/logs/a.md
    elsewhere/submitted.json /dev/null - gone/x.html"""


def answer(*paths, inputs, whatever_it_holds=False):
    """Return how a command that writes these files is refused, or that it is not."""
    targets = {f"--{n}": Path(path) for n, path in enumerate(paths)}
    try:
        cli.refuse_data({**targets, "--none": None}, inputs, whatever_it_holds=whatever_it_holds)
    except BadInput as error:
        return str(error).splitlines()
    return ["may be written"]


def test_a_file_with_data_is_never_replaced(short_path, monkeypatch, pages):
    monkeypatch.chdir(short_path)
    for first in ("july/tasks/4821_0.r0.gpu1.log", "sent/submitted.json", "emulated/logs/emulation.lock", "costs.toml",
                  "july.csv", "elsewhere/tasks/x", "elsewhere/logs/x", "july/report.html"):  # fmt: skip
        Path(first).parent.mkdir(parents=True, exist_ok=True)
        Path(first).touch()
    run, source = short_path / "july", short_path / "july.csv"
    (run / "run.toml").write_text(f'[run]\nsource = ["{source}"]\n')
    make_wav(Path("site.html"), 1.0)  # called like a page, and yet a recording
    Path("site.flac").write_bytes(b"fLaC")
    with closing(sqlite3.connect("all.md")) as db, db:
        db.execute("CREATE TABLE t (a)")
    os.link("july.csv", "hard-link.html")
    Path("link.html").symlink_to("july/run.toml")
    for job in (run, run / "job.sqlite", run / "tasks", run / "tasks" / "4821_0.r0.gpu1.sqlite"):
        assert cli.sources_of(job) == [source]
    inputs = [run, *cli.sources_of(run), Path("costs.toml"), Path("gone")]
    said = {}
    for name in TARGETS.split():
        said[name] = answer("new.html", name, "/dev/null", "/dev/null", "-", inputs=inputs)
        whole = answer("new.html", str(Path(name).absolute()), inputs=inputs)
        assert name == "-" or (len(whole) > 1) == (len(said[name]) > 1), name
    for name in ("all.md", "july/job.sqlite"):
        said[f"{name}, whatever it holds"] = answer(name, inputs=[], whatever_it_holds=True)
    said["x.html twice"] = answer("x.html", "y.md", "july/../x.html", inputs=[])
    pages({"targets.txt": page(said).replace(str(short_path), "FOLDER")})
    (run / "run.toml").write_text("[run\n")
    assert cli.sources_of(run) == cli.sources_of(short_path) == []
    assert all(map(cli.is_stdout, map(Path, ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"))))
    assert not any(map(cli.is_stdout, (None, Path("./-/x"), Path("/dev/stderr"))))


ROOT = Path(__file__).parents[3]
PROGRAM = typer.main.get_command(app)
PARSE = make_parser(PROGRAM)


def test_every_help_page(pages, capsys):
    said = {}
    for command in ("", *BY_NAME):
        app([*filter(None, [command]), "--help"], standalone_mode=False)
        said[f"{command or 'badcjobs'}.txt"] = capsys.readouterr().out
    pages(said)
    assert max(len(line) for text in said.values() for line in text.splitlines()) <= 80
    assert max(text.count("\n") for text in said.values()) <= 40
    del said["badcjobs.txt"]
    assert len(re.findall(r"(?m)^  (?:-\w, )?--?[\[a-z]", "\n".join(said.values()))) <= 130
    assert all(f"Example:\n  badcjobs {command}" in said[f"{command}.txt"] for command in BY_NAME)


def test_the_handbook_is_a_list_of_short_pages_with_commands_that_exist(capsys):
    assert guide(None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(PAGES)
    assert max(map(len, lines)) <= 100
    words = {path.stem: len(path.read_text(encoding="utf-8").split()) for path in folder("guide").glob("*.md")}
    assert (words.keys(), max(words.values()) <= 1_500, sum(words.values()) <= 12_000) == (PAGES.keys(), True, True)
    for name in PAGES:
        page = read_topic(name)
        assert re.match(r"# \w+: ", page)
        assert not re.findall(r"\{\{[a-z: ]+\}\}", page), "an open placeholder"
        for line in re.findall(r"(?m)^    (?:nohup |exec )?badcjobs ([a-z][^…\n]*)$", page):
            own, _, of_run = re.split(r" {3,}| [#>|&]", line)[0].partition(" -- ")
            commands = [own] if own.startswith("record ") else [own, f"run {of_run}"]
            assert not any(PARSE(shlex.split(words)).wrong for words in commands), line
    with pytest.raises(BadInput) as refused:
        read_topic("sbatch")
    assert refused.value.why == "pages are " + ", ".join(PAGES)


OPTIONS = {name: {"--config", "--debug", "--help"} for name in PROGRAM.commands}
for name, known in OPTIONS.items():
    known.update(*((*one.opts, *one.secondary_opts) for one in PROGRAM.get_command(None, name).params))
OPTIONS["check"] |= OPTIONS["submit"]
# A command ends at a quotation mark, a bracket, a comment, the next command, or the end of a sentence or line.
SUGGESTED = re.compile(r"\bbadcjobs ([a-z]+)\b([^\n`\"()|;#]*?)(?=   |[.,:] |&&|[\n`\"()|;#]|$)")
OPTION = re.compile(r"(?<![\w=-])--[a-z][a-z-]*")
PLACES = ("badcjobs/**/*.py", "badcjobs/**/*.md", "templates/*", "slurm/**/*.*", "README.md")


def find_wrong(text):
    """Yield the suggested commands with an option or a page that does not exist."""
    for found in SUGGESTED.finditer(text):
        command, (own, _, after) = found[1], re.sub("'[^']*'", "", found[2]).partition(" -- ")  # without other programs
        if command in OPTIONS:
            wrong = {*OPTION.findall(own)} - OPTIONS[command]
            if command != "record":
                wrong |= {*OPTION.findall(after)} - OPTIONS["run"]
            wrong |= {*re.findall(r"^ ([a-z-]+)", own)} - PAGES.keys() if command == "guide" else set()
            if wrong:
                yield found[0]


def test_commands_in_messages_pages_and_scripts_have_only_options_and_pages_that_exist():
    files = sorted(path for place in PLACES for path in ROOT.glob(place) if path.is_file())
    assert [(file.name, wrong) for file in files for wrong in find_wrong(file.read_text("utf-8"))] == []
    assert list(find_wrong("try: badcjobs submit x --retries 2 -- --retries 2 or `badcjobs guide sbatch`")) == [
        "badcjobs submit x --retries 2 -- --retries 2 or ", "badcjobs guide sbatch"
    ]  # fmt: skip
