"""The template of --command: its words and placeholders, checked before anything is started."""

from __future__ import annotations

import pytest
from rooms.model import Chunk
from rooms.root import BadInput, NotHere, SubprocessLauncher, SystemClock
from rooms.workers import PLACEHOLDERS, CommandEngine, EngineStart, parse_batch_size, parse_command, split_batch


def refusal(template: str) -> BadInput:
    with pytest.raises(BadInput) as refused:
        parse_command(template)
    assert refused.value.exit_code == 2
    return refused.value


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("prog {input} {output}", ["prog", "{input}", "{output}"]),
        ("prog --in={input} -o{output}", ["prog", "--in={input}", "-o{output}"]),
        ("'my prog' \"{input}\" {output}", ["my prog", "{input}", "{output}"]),
        ("sh -c 'cat {input} > {output}'", ["sh", "-c", "cat {input} > {output}"]),
        (r"prog {input} {output} a\ b", ["prog", "{input}", "{output}", "a b"]),
    ],
)
def test_a_command_is_split_as_a_shell_splits_it(template: str, words: list[str]) -> None:
    assert parse_command(template) == (words, False)


def test_every_placeholder_of_the_contract_is_known() -> None:
    per_chunk = {"input", "output", "device", "device_index", "chunk_id", "recording_id"}
    assert set(PLACEHOLDERS) == per_chunk | {"inputs", "outputs"}
    assert not parse_command(" ".join(["prog", *(f"{{{name}}}" for name in per_chunk)]))[1]
    assert parse_command("prog {inputs} {outputs} {device} {device_index}")[1]


@pytest.mark.parametrize(
    ("template", "faults"),
    [
        ("prog", ["{input} is missing", "{output} is missing"]),
        ("prog {input}", ["{output} is missing"]),
        ("prog {inputs}", ["{outputs} is missing"]),
        ("prog {inputs} {output}", ["{outputs} is missing", "{output} cannot be used together with {inputs}"]),
        ("prog {inputs} {outputs} {chunk_id}", ["{chunk_id} cannot be used together with {inputs}"]),
        ("prog {entry} {output}", ["{entry} is not a placeholder", "{input} is missing"]),
        ("prog {input} {output} {}", ["{} is not a placeholder"]),
        ("prog {input} {output} {0}", ["{0} is not a placeholder"]),
        ("prog {input} {output} {device.uuid}", ["{device.uuid} is not a placeholder"]),
        ("", ["{input} is missing", "{output} is missing"]),
    ],
)
def test_all_faults_of_a_template_are_named_at_once(template: str, faults: list[str]) -> None:
    refused = refusal(template)
    assert refused.what == f"--command {template!r}: " + ", ".join(faults)
    assert "{input} {output} {inputs} {outputs} {device}" in (refused.why or "")
    assert "--command 'program {input} {output}'" in (refused.fix or "")


@pytest.mark.parametrize("template", ["prog {input} {output", "prog {input} {output} }", "prog '{input} {output}"])
def test_a_template_that_cannot_be_read_is_refused_with_the_reason(template: str) -> None:
    refused = refusal(template)
    assert refused.what == f"--command {template!r} cannot be read"
    assert refused.why


@pytest.mark.parametrize("template", ["prog {input} {output:>9q}", "prog {input!x} {output}", "prog {input:{output}}"])
def test_a_placeholder_with_a_format_of_its_own_is_refused_now_not_at_the_first_chunk(template: str) -> None:
    assert refusal(template).what.startswith(f"--command {template!r}")


def test_braces_are_written_twice() -> None:
    assert parse_command("awk '{{print $1}}' {input} {output}")[0][1] == "{{print $1}}"


def test_a_program_that_is_not_there_is_found_out_before_the_first_chunk() -> None:
    start = EngineStart((), {"PATH": "/usr/bin:/bin"}, SubprocessLauncher("test"), SystemClock())
    engine = CommandEngine(start, "no-such-program {input} {output}")
    with pytest.raises(NotHere) as refused:
        engine.check()
    assert "'no-such-program'" in refused.value.what
    assert refused.value.exit_code == 3


def test_the_size_of_a_batch_can_be_said() -> None:
    assert parse_batch_size([]) == 64
    assert parse_batch_size(["--batch=5"]) == 5


@pytest.mark.parametrize("arg", ["--batch=0", "--batch=-1", "--batch=many", "--batch", "--threads=3"])
def test_an_argument_that_the_command_engine_does_not_know_is_refused(arg: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_batch_size([arg])
    assert arg in refused.value.what
    assert "--batch=64" in (refused.value.fix or "")


def test_no_two_files_of_one_name_are_in_one_batch() -> None:
    """Their tables would have one name, too."""
    paths = ["/x/a.wav", "/y/A.flac", "/x/b.wav", "/z/a.wav", "/x/c.wav", "/x/d.wav"]
    batch = [Chunk(path, path, path, path) for path in paths]
    parts = [[chunk.audio_path for chunk in part] for part in split_batch(batch, 3)]
    assert parts == [["/x/a.wav", "/x/b.wav", "/x/c.wav"], ["/y/A.flac", "/x/d.wav"], ["/z/a.wav"]]
