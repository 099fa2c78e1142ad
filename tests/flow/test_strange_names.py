"""Chunks with names that would steer a terminal or forge a line of a log: from the run to the report."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from support.badcjobs_program import ON_CPU, Site, assert_refused

RED, TWO_LINES, TURNED, LETTERS = "\x1b[31mred", "a\nb", "a\u202eb", "Ñandú鳥"
# One line of a log, or what visibly belongs to the one before it.
LINE_OF_A_LOG = re.compile(r"\d{4}-\d\d-\d\dT[\d:]{8} (INFO|WARNING|ERROR) |    \| ")


def strange_manifest(site: Site) -> Path:
    path = site.manifest(5)
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    for row, name in zip(rows, (RED, TWO_LINES, TURNED, LETTERS), strict=False):
        row[1] = name
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def assert_plain(*texts: str) -> None:
    for text in texts:
        assert all(line.isprintable() for line in text.split("\n")), text


def test_names_and_an_engines_words_reach_neither_terminal_nor_log_as_they_are(site: Site) -> None:
    engine = site.script("engine", r"""printf 'no \033[2J luck\n\342\200\256turned\007\n' >&2; exit 3""")
    command = ("--engine", "command", "--command", f"{engine} {{input}} {{output}}")
    done = site.run(strange_manifest(site), *ON_CPU[2:], *command, "--retries", 1)
    assert done.exit_code != 0
    (log,) = site.out.glob("tasks/*.log")
    told = log.read_text()
    assert_plain(done.stdout, done.stderr, told)
    assert "rec0/�[31mred failed (" in told
    assert "�turned�" in told
    assert LETTERS in told
    assert [line for line in (told + done.stderr).splitlines() if not LINE_OF_A_LOG.match(line)] == []
    merged = site.badcjobs("merge", site.out)
    report, document = site.badcjobs_each([("report", site.out), ("report", site.out, "--json")])
    assert_plain(merged.stdout, merged.stderr, report.stdout, document.stdout)
    assert "�[31mred" in report.stdout
    assert {chunk["chunk_id"] for chunk in document.json["failed_chunks"]} >= {RED, TWO_LINES, TURNED, LETTERS}


def test_a_mistake_in_a_source_is_told_in_letters(site: Site) -> None:
    manifest = strange_manifest(site)
    manifest.write_text(manifest.read_text(encoding="utf-8").replace("c004.wav", "\x1b[2Jgone.wav"), encoding="utf-8")
    refused = site.badcjobs("submit", manifest, "--out", site.out, "--cluster", "local", "--", *ON_CPU)
    assert_refused(refused, 2, "gone.wav")
    assert_plain(refused.stderr)
