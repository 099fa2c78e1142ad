"""What came from files reaches a terminal or a log only as letters: it steers nothing and forges no line."""

from __future__ import annotations

import json
import logging

from rooms.cli import SafeFormatter, safe_error, safe_json, safe_lines
from rooms.root import BadInput

RED = "\x1b[31mred"
TWO_LINES = "a\nb"
TURNED = "a\u202eb\u200f"
LETTERS = "Ñandú 鳥 птица 🐦 ×"


def logged(message: str, *args: object, error: BaseException | None = None) -> str:
    trouble = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("badcjobs", logging.WARNING, "task.py", 1, message, args, trouble)
    return SafeFormatter("12:00 %(levelname)s %(message)s").format(record)


def test_a_log_line_has_no_sign_that_steers_a_terminal() -> None:
    assert logged("%s failed (%s)", RED, TURNED) == "12:00 WARNING �[31mred failed (a�b�)"
    assert logged("%s", "\x9b2J\r\x07\x7f") == "12:00 WARNING �2J���"


def test_a_name_of_two_lines_cannot_forge_a_line_of_the_log() -> None:
    forged = logged("%s failed", "a\n12:00 INFO    task ends: done")
    assert forged == "12:00 WARNING a\n    | 12:00 INFO    task ends: done failed"
    assert logged("%s failed", TWO_LINES).splitlines()[1:] == ["    | b failed"]


def test_a_traceback_stays_readable_and_is_marked_as_what_it_is() -> None:
    try:
        raise ValueError(f"no header\r\nin {RED}")
    except ValueError as error:
        first, *others = logged("on_alert failed", error=error).splitlines()
    assert first == "12:00 WARNING on_alert failed"
    assert others[0] == "    | Traceback (most recent call last):"
    assert others[-2:] == ["    | ValueError: no header", "    | in �[31mred"]


def test_letters_of_every_script_stay_as_they_are() -> None:
    assert logged("%s", LETTERS).endswith(LETTERS)
    assert safe_lines(f"{LETTERS}\n{LETTERS}") == f"{LETTERS}\n{LETTERS}"
    assert safe_json(json.dumps(LETTERS, ensure_ascii=False)) == f'"{LETTERS}"'


def test_only_a_text_that_we_have_painted_keeps_colours_and_nothing_else() -> None:
    painted = "july: \x1b[32mall done\x1b[0m \x1b[2J"
    assert safe_lines(painted, painted=True) == "july: \x1b[32mall done\x1b[0m �[2J"
    assert "\x1b" not in safe_lines(painted)


def test_a_document_keeps_its_tabs_and_a_result_has_none() -> None:
    assert safe_lines("if x\n\tls\x07", tabs=True) == "if x\n\tls�"
    assert safe_lines("a\tb") == "a�b"


def test_a_json_document_says_the_same_with_every_sign_spelled_out() -> None:
    document = {"name": [RED, TWO_LINES, TURNED, "\x7f\x9b", "\U000e0041", LETTERS]}
    text = safe_json(json.dumps(document, indent=2, ensure_ascii=False))
    assert json.loads(text) == document
    assert all(line.isprintable() for line in text.split("\n"))
    assert "\\u202e" in text


def test_an_error_says_what_happened_in_one_line_and_why_in_several() -> None:
    error = BadInput(f"{TWO_LINES} {RED}", why=f"line 3: {RED}\nline 4: {TURNED}", fix="sed -n 3p x.csv")
    assert safe_error(error).splitlines() == [
        "badcjobs: error: a�b �[31mred",
        "  why: line 3: �[31mred",
        "       line 4: a�b�",
        "  try: sed -n 3p x.csv",
    ]
