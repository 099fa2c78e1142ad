"""Shell taken apart: where a command begins, and which commands get a shell of their own."""

from __future__ import annotations

import pytest

from badcjobs.shell_commands import BACKGROUND, BRACKETS, PIPELINE, blank_here_documents, read_commands
from badcjobs.shell_files import may_make_files
from badcjobs.shell_variables import Variables, read_flags

HERE_SCRIPT = """#!/bin/bash
cat > next.sbatch <<'END'
#SBATCH --time=1:00
exec badcjobs run x
END
cat <<-A && cat <<B
	one
	A
two
B
true
"""


MARKS = {None: "", PIPELINE: "|", BACKGROUND: "&", BRACKETS: "("}


def within(line: str) -> str:
    """Return the first word of each command, with a mark for what gives it a shell of its own."""
    return " ".join(command.words[0] + MARKS[command.within] for command in read_commands(line))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a; b", "a b"),
        ("a && b || c", "a b c"),
        ("a | b", "a| b|"),
        ("a 2>&1 |\n  b", "a| b|"),
        ("a |& b; c", "a| b| c"),
        ("a; { b; c; } | d", "a b| c| d|"),
        ("a | while read x; do b; done; c", "a| read| b| c"),
        ("if a; then b; fi | c; d", "a| b| c| d"),
        ("a &", "a&"),
        ("a && b & c", "a& b& c"),
        ("( a; b )", "a( b("),
        ("(\n  a\n)\nb", "a( b"),
        ("a > x 2>&1 < y &> z", "a"),
        ("a > >(b | c)", "a"),
        ("a \"x | y\" '( z' \\& $(b | c) `d &`", "a"),
        ("case $x in a|b) c ;; *) d ;; esac; e", "case| c d e"),
        ("f() { a; }; b", "a b"),
        ("x=(a | b)", "x=(a | b)"),
        ("a # b | c", "a"),
        ("[[ $x == @(a|b) ]] || c", "[[ c"),
        ("a 'never closed", "a"),
        ("fi } ) done; a", "a"),
    ],
)
def test_what_has_a_shell_of_its_own_is_known(line: str, expected: str) -> None:
    assert within(line) == expected


def test_a_command_keeps_its_line_its_text_and_its_words() -> None:
    first, second = read_commands('#!/bin/sh\n\ncd x && exec "$B" run \\\n    a --out "b c" 2> log # why\n')
    assert (first.line, second.line) == (3, 3)
    assert second.words == ["exec", '"$B"', "run", "a", "--out", '"b c"']
    assert second.text == 'exec "$B" run a --out "b c" 2> log'


def test_what_may_run_or_not_or_more_than_once_is_not_sure() -> None:
    script = "a\nif b; then c; else d; fi\nfor x in 1 2; do e; done\nf() { g; }\n[ x ] && h\ni || j\nk && l\n"
    sure = {command.words[0] for command in read_commands(script) if command.sure}
    assert sure == {"a", "[", "i", "k", "l"}
    assert [command.words[0] for command in read_commands(script) if command.looped] == ["for", "e"]


def test_here_documents_are_no_commands_and_leave_the_lines_where_they_are() -> None:
    assert [command.words for command in read_commands(HERE_SCRIPT)] == [["cat"], ["cat"], ["cat"], ["true"]]
    clean = blank_here_documents(HERE_SCRIPT).splitlines()
    assert clean[2:5] == ["", "", ""]
    assert clean[10] == "true"


def followed(script: str, word: str, **environ: str) -> str | None:
    variables = Variables({"HOME": "/home/ada", **environ}, "/submit")
    for command in read_commands(script):
        variables.pass_by(command)
    return variables.value_of(word)


@pytest.mark.parametrize(
    ("script", "word", "value"),
    [
        ("A=x", "$A/y", "x/y"),
        ("A=x; B=$A/b", '"${B}"', "x/b"),
        ("export A='x y' B=2", '"$A"', "x y"),
        (': "${A:=x}"', "$A", "x"),
        ('A=z; : "${A:=x}"', "$A", "z"),
        ("", "${A:-d}", "d"),
        ("", "$A", None),
        ("", "'$A'", "$A"),
        ("", "~/x", "/home/ada/x"),
        ("", "~bob/x", None),
        ("A=$(date)", "$A", None),
        ("A=x; A=$UNKNOWN", "$A", None),
        ("A=x; if b; then A=y; fi", "$A", None),
        ("A=x; [ b ] && A=y", "$A", None),
        ("A=x; ( A=y )", "$A", "x"),
        ("A=x; A+=y", "$A", None),
        ("A=x; read A < file", "$A", None),
        ("A=x; unset A", "$A", None),
        ("", "$SLURM_SUBMIT_DIR/o", "/submit/o"),
        ("", "$SLURM_JOB_ID", None),
    ],
)
def test_a_variable_is_followed_as_far_as_the_script_is_plain(script: str, word: str, value: str | None) -> None:
    assert followed(script, word, SLURM_JOB_ID="7") == value  # another job's number is not this one's


@pytest.mark.parametrize(
    ("script", "path"),
    [
        ("", "o"),
        ("cd /data", "/data/o"),
        ("cd /data && cd x", "/data/x/o"),
        ('cd "$SLURM_SUBMIT_DIR"', "o"),
        ("cd $WHERE", None),
        ("if a; then cd /b; fi", None),
        ("( cd /data )", "o"),
        ("cd", "/home/ada/o"),
        ("cd /data; cd -", None),
    ],
)
def test_a_relative_path_starts_where_the_script_has_gone(script: str, path: str | None) -> None:
    variables = Variables({"HOME": "/home/ada"}, "/submit")
    for command in read_commands(script):
        variables.pass_by(command)
    assert variables.path_of("o") == path


def test_flags_come_out_of_arrays_and_variables_and_what_may_hide_more_is_known() -> None:
    variables = Variables({}, "/submit")
    *before, last = read_commands('A=(--x "1 2" # why\n --y=$U)\nM="--z 3"\nbadcjobs run "${A[@]}" $M --w --v "$U"\n')
    for command in before:
        variables.pass_by(command)
    flags, named, hidden = read_flags(variables.words_of(last), variables)
    assert flags == {"--x": "1 2", "--z": "3"}
    assert named == {"--x", "--y", "--z", "--w", "--v"}
    assert not hidden  # a word in quotation marks is one value
    assert read_flags(["$U"], variables)[2]
    assert read_flags(['"${MORE[@]}"'], variables)[2]


def test_the_patterns_of_a_case_are_no_commands() -> None:
    text = 'case $X in\n  a | "$HOME"/*) cd x ;;\n  *) (exec y) ;;\nesac\ncase $Z in c) cd z ;; esac\ncd w\n'
    assert [" ".join(one.words) for one in read_commands(text)] == [
        "case $X in", "cd x", "exec y", "case $Z in c", "cd z", "cd w",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "makers"),
    [
        ("A=1; B=(x y); echo z >&2; ls 2>/dev/null; exec > >(tee log)", []),
        ('[[ -n $A && -f b && $C == d ]] || echo no; [[ $A != @("$HOME"|/arc)/* ]] || echo no', []),
        ("ls *.wav > list.txt; python make.py; A=1 ./make; echo a >> list.txt", ["ls", "python", "./make", "echo"]),
        ("refuse '<a>/b'; refuse > list.txt", ["refuse"]),
        ("cat > list.txt <<E\na.wav\nE\ntrue", ["cat"]),
    ],
)
def test_commands_that_may_leave_files_are_told_from_those_that_only_speak(text: str, makers: list[str]) -> None:
    found = [one for one in read_commands(text) if may_make_files(one, {"refuse"})]
    assert [next(word for word in one.words if "=" not in word) for one in found] == makers
