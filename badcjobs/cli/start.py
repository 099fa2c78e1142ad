"""First steps: ``badcjobs demo``, the pages of ``badcjobs guide``, and ``badcjobs template``."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from badcjobs.cli.options import JsonWanted, Target, refuse_data
from badcjobs.cli.output import answer, colour_wanted, hand_out, print_json, read_world, remark, say
from badcjobs.errors import BadcjobsError, BadInput

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from badcjobs.store.job_schema import ViewDef
    from badcjobs.store.schema import TableDef

_RATE = 8000
_CHUNK_S = 30
_RECORDINGS, _CHUNKS_EACH = 6, 16
_TASKS, _GPUS, _GPUS_PER_TASK = 4, 4, 2
_BURN_S = 0.1
_HEADER = ("recording_id", "chunk_id", "source_path", "start_ms", "end_ms", "overlap_ms", "sha256", "notes")


# --- the demo ---------------------------------------------------------------------------------------------------------


def demo(
    out: Annotated[Path | None, typer.Option(help="Folder for everything [a new badcjobs-demo here].")] = None,
    json_wanted: JsonWanted = False,
) -> int:
    """Run a small array on simulated GPUs, over audio it makes, to the merged summary and report.html.

    In a folder that holds a demo already it goes on as any run does: what is done stays done.

    Example: badcjobs demo --out /tmp/first-look
    """
    from itertools import chain, count

    from badcjobs.cli.results import files_text
    from badcjobs.cluster.local import emulate_order
    from badcjobs.cluster.local_array import LocalSettings
    from badcjobs.model import ArrayOrder, StandIn
    from badcjobs.paths import RunFolder
    from badcjobs.report.text import summary_text

    names = map(Path, chain(["badcjobs-demo"], (f"badcjobs-demo-{number}" for number in count(2))))
    folder = out or next(name for name in names if not name.exists())  # a second demo starts afresh
    if folder.exists():
        remark(f"{folder} is there already: what is done in it stays done; without --out a new folder is made")
    remark("making audio, then an array of 4 tasks on 4 simulated GPUs (about 10 s) …")
    world = read_world()
    place = world.cwd / folder
    RunFolder(place).create()
    arguments = (
        "run", str(make_audio(place / "audio")), f"--out={place}", "--engine", "demo",
        f"--engine-arg=--burn-s={_BURN_S}", "--simulate", str(_GPUS), "--interval", "0.5",
    )  # fmt: skip
    order = ArrayOrder(place, arguments, _TASKS, gpus_per_task=_GPUS_PER_TASK, time_min=10, name="demo")
    # Its devices are its own: it waits for no other run, and keeps none off.
    done = emulate_order(order, LocalSettings(StandIn(simulate=_GPUS), lock=False), world, lambda line: None)
    if done.job is None or done.exit_code not in (0, 130):
        bad = next(row for row in done.rows if row.exit_code != 0)
        raise BadcjobsError(
            f"demo task {bad.index} ended with exit code {bad.exit_code}",
            why=bad.log.read_text(errors="replace").strip()[-2000:] if bad.log.exists() else bad.note,
            fix=f"cat {bad.log}",
        )
    if json_wanted:
        print_json(done.job.summary.to_dict())
        return done.exit_code
    say(summary_text(done.job.summary, folder.name, colour=colour_wanted()), painted=True)
    say("\n".join(["", "  each task", f"    badcjobs {' '.join(arguments)}", ""]))
    say(files_text(done.job))
    return done.exit_code


def make_audio(folder: Path) -> Path:
    """Write recordings of faint noise with loud chirps in them, always the same, and their manifest."""
    import csv
    import random

    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.csv"
    chance = random.Random(2026)
    noise = array("h", (chance.randint(-400, 400) for _ in range(_RATE * _CHUNK_S)))
    with manifest.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(_HEADER)
        for recording in range(1, _RECORDINGS + 1):
            site = f"site{recording:02d}"
            for chunk in range(_CHUNKS_EACH):
                start_s = chunk * _CHUNK_S
                path = (folder / f"{site}_{start_s:04d}.wav").absolute()
                write_chunk(path, noise, chance)
                end_ms = (start_s + _CHUNK_S) * 1000
                rows.writerow((site, f"{site}_c{chunk:03d}", path, start_s * 1000, end_ms, 0, "", ""))
    return manifest


def write_chunk(path: Path, noise: array[int], chance: random.Random) -> None:
    """Write one chunk: the noise, and now and then a chirp; a file that holds it already stays as it is.

    A second demo in the same folder would else find other audio than was done, and do it all again.
    """
    import io
    import wave

    samples = array("h", noise)
    for _ in range(chance.randint(0, 3)):
        start = chance.randrange(0, len(samples) - _RATE)
        pitch = chance.uniform(0.9, 2.2)
        length = chance.randrange(_RATE // 5, _RATE // 2)
        samples[start : start + length] = array("h", (int(16_000 * math.sin(i * pitch)) for i in range(length)))
    made = io.BytesIO()
    with wave.open(made, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(_RATE)
        audio.writeframes(samples.tobytes())
    if not path.exists() or path.read_bytes() != made.getvalue():
        path.write_bytes(made.getvalue())


# --- the handbook: pages in guide/, some of them made from the code they describe -------------------------------------


def guide(
    topic: Annotated[str | None, typer.Argument(help="Which page; without one, the list of pages.")] = None,
) -> int:
    """Show a page of the handbook, or the list of pages.

    Example: badcjobs guide sbatch
    """
    if topic is not None:
        hand_out(read_topic(topic))
        return 0
    lines = [f"  {name:<12} {text.partition(chr(10))[0].lstrip('# ')}" for name, text in sorted(_pages().items())]
    hand_out("\n".join(["Pages of the guide (badcjobs guide TOPIC):", "", *lines]))
    return 0


def read_topic(topic: str) -> str:
    """Return one page, with its placeholders filled in."""
    from badcjobs.paths import folder
    from badcjobs.store.job_schema import JOB_TABLES, JOB_VIEWS

    pages = _pages()
    if topic not in pages:
        raise BadInput(f"there is no page {topic!r}", why="pages are " + ", ".join(sorted(pages)), fix="badcjobs guide")
    script = (folder("templates") / "array.sbatch").read_text(encoding="utf-8")
    made = {
        "{{template}}": "\n".join("    " + line if line else "" for line in script.splitlines()),
        "{{tables}}": _sections(JOB_TABLES),
        "{{views}}": _sections(JOB_VIEWS),
        "{{view names}}": ", ".join(f"`{view.name}`" for view in JOB_VIEWS),
        "{{folder:templates}}": str(folder("templates")),
    }
    text = pages[topic]
    for placeholder, words in made.items():
        text = text.replace(placeholder, words)
    return text.rstrip()


def _pages() -> dict[str, str]:
    from badcjobs.paths import folder

    return {path.stem: path.read_text(encoding="utf-8") for path in folder("guide").glob("*.md")}


def _sections(tables: Iterable[TableDef | ViewDef]) -> str:
    sections = []
    for table in tables:
        width = max(len(column.name) for column in table.columns)
        rows = [f"    {column.name:<{width}}  {column.help}" for column in table.columns]
        sections.append("\n".join([f"## {table.name}", "", table.help, "", *rows]))
    return "\n\n".join(sections)


# --- templates --------------------------------------------------------------------------------------------------------


def template(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which one; without it: the list.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Fill in a key; repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write it to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json_wanted: JsonWanted = False,
) -> int:
    """Print a batch script that sbatch takes, filled in as far as --set says; without NAME, list the templates.

    The keys are the names of its #SBATCH options and, in small letters, of its variables; an unknown or missing one is
    named. What is left open can be edited, or named when the script is submitted.

    Example: badcjobs template sockeye-array --set account=st-pi-1-gpu --set time=12:00:00 -o job.sbatch
    """
    from badcjobs.cluster.templates import fill_template, list_templates, write_script

    if name is None:
        if settings or output:
            raise BadInput("which template? NAME is missing", fix="badcjobs template")
        shelf = list_templates()
        width = max(len(one.name) for one in shelf)
        lines = [f"  {one.name:<{width}}  {one.about}" for one in shelf]
        text = "\n".join(["Templates (badcjobs template NAME --set KEY=VALUE -o job.sbatch):", "", *lines])
        answer(json_wanted, lambda: {"templates": [one.to_dict() for one in shelf]}, lambda: text)
        return 0
    filled = fill_template(name, settings or [], complete=bool(settings) or output is not None)  # else it is looked at
    if output is not None:
        refuse_data([Target("-o", output, "job.sbatch")])
        write_script(output, filled.text, force=force)
    if json_wanted:
        print_json({**filled.to_dict(), "text": filled.text, "file": None if output is None else str(output)})
        return 0
    if output is None:
        hand_out(filled.text.rstrip("\n"))
    else:
        say(f"{output} is written; next: sbatch {output}")
    if filled.open:
        remark(f"still open, to edit or to name in sbatch --export: {', '.join(filled.open)}")
    return 0
