"""Whether audio is staged: decided from where it lies and what the node has, and told in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import Chunk
from rooms.workers import choose_staging
from support.small_disk import small_disk

FAR = Chunk("r", "far", "status", "/proc/self/status")  # proc: not known to be local, so treated as shared


def near(folder: Path) -> Chunk:
    return Chunk("r", "near", "a.wav", str(folder / "a.wav"))


def test_audio_on_a_shared_filesystem_is_copied_to_a_node_with_a_local_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "node"), small_disk(tmp_path / "audio"):
        choice = choose_staging("auto", [near(tmp_path / "audio"), FAR], tmp_path / "node")
        assert choice.staged
        assert choice.why.startswith("/proc/") and "is on proc, treated as shared" in choice.why
        assert choice.why.endswith(f"{tmp_path / 'node'} on tmpfs, local")


def test_audio_on_a_local_disk_is_read_where_it_lies(tmp_path: Path) -> None:
    with small_disk(tmp_path / "node"), small_disk(tmp_path / "audio"):
        choice = choose_staging("auto", [near(tmp_path / "audio")], tmp_path / "node")
        assert (choice.staged, choice.why) == (False, f"{tmp_path / 'audio'} is local")


def test_a_link_to_a_shared_filesystem_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    with small_disk(tmp_path / "node"), small_disk(tmp_path / "audio"):
        (tmp_path / "audio" / "a.wav").symlink_to("/proc/self/status")
        assert choose_staging("auto", [near(tmp_path / "audio")], tmp_path / "node").staged


def test_a_node_without_a_disk_of_its_own_copies_nothing() -> None:
    choice = choose_staging("auto", [FAR], Path("/proc"))
    assert not choice.staged
    assert "/proc is not a node-local disk (proc, treated as shared" in choice.why


def test_without_a_disk_of_the_node_nothing_is_cut_before_it_is_wanted(tmp_path: Path) -> None:
    cut = replace(near(tmp_path), is_cut=True)
    assert choose_staging("auto", [cut], tmp_path).only_cuts
    assert not choose_staging("auto", [cut], Path("/proc")).staged


@pytest.mark.parametrize(("wanted", "staged"), [("always", True), ("never", False)])
def test_whoever_says_what_he_wants_gets_it(tmp_path: Path, wanted: str, staged: bool) -> None:
    choice = choose_staging(wanted, [near(tmp_path)], Path("/proc"))
    assert (choice.staged, choice.why) == (staged, f"run.stage = {wanted}")


def test_with_nothing_to_do_there_is_nothing_to_copy(tmp_path: Path) -> None:
    assert not choose_staging("auto", [], tmp_path).staged


def test_a_disk_in_memory_gets_less(tmp_path: Path) -> None:
    with small_disk(tmp_path / "node"):
        assert choose_staging("always", [FAR], tmp_path / "node").most_bytes == 2**30
    assert choose_staging("always", [FAR], Path("/proc")).most_bytes > 2**30


def test_a_loop_of_links_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "a.wav").symlink_to("a.wav")
    assert choose_staging("auto", [near(tmp_path)], tmp_path).why
