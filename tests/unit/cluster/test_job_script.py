"""Job scripts as sbatch and a shell read them: options, calls of badcjobs, mistakes; and what the emulation asks.

The inputs stand in tests/data, what is understood of them in the pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rooms.cli import app, make_parser
from rooms.cluster import find_srun, is_job_script, read_request, read_script, submit_words
from rooms.root import BadInput, SubmitSettings, folder
from support.brief import brief, page
from support.pages import Pages

PARSE = make_parser(typer.main.get_command(app))
DATA = Path(__file__).parents[2] / "data"
CALLS, OPTIONS, REQUESTS, FORMS = (
    [one.replace("⏎", "\n").replace("␍", "\r") for one in part.split("\n")[1:-1]]
    for part in (DATA / "job_lines.txt").read_text().split("# --- ")[1:]
)
WHOLE = (DATA / "whole_job.sbatch").read_text()


def script(*lines: str) -> str:
    return "\n".join(["#!/bin/bash", *lines, ""])


def read(text: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    found = read_script(text, "job.sbatch", environ or {}, "/work", parse=PARSE)
    asked = brief(read_script(text, "job.sbatch", {}, "/work").asked)
    more = {"asked without a parser": asked} if asked != brief(found.asked) else {}
    calls = [
        {**brief(call), "is": [name for name in ("by_exec", "by_srun", "spread", "contained") if getattr(call, name)],
         "keeper": call.keeper, "may set": [key for key in ("cpu_workers", "retries") if call.may_set(key)]}
        for call in found.calls
    ]  # fmt: skip
    known = {key: one for key, one in brief(found).items() if key not in ("name", "options", "calls")}
    return {**known, **more, **({"calls": calls} if calls else {})}


def options(text: str) -> dict[str, Any]:
    """Return what a script asks for with these options, of which a GPU would be missed."""
    return {key: one for key, one in read(script(f"#SBATCH {text}", "badcjobs run m")).items() if key != "calls"}


def test_what_is_understood_of_a_script_is_what_sbatch_and_the_shell_make_of_it(pages: Pages) -> None:
    known = {"OUT": "/scratch/other", "NAME": "birds", "X": "cuda", "SLURM_ARRAY_TASK_ID": "3"}
    whole = {
        "as it is": read(WHOLE), "variables": read(WHOLE, known),
        "none exported": read(WHOLE.replace("#SBATCH --open", "#SBATCH --export=NONE,NAME=me\n#SBATCH --open"), known),
        "elsewhere": read(WHOLE.replace("#SBATCH --open", "#SBATCH -D sub\n#SBATCH --open").replace("/scratch", "res")),
        "environment wins": read(
            WHOLE, {"SBATCH_TIMELIMIT": "60", "SBATCH_ACCOUNT": "a", "SBATCH_SIGNAL": "", "SBATCH_GPUS": "9"}
        ),
    }  # fmt: skip
    pages({
        "whole.txt": page(whole),
        "calls.txt": page({one: read(script(one)) for one in CALLS}),
        "options.txt": page({one: options(one) for one in OPTIONS}),
        "forms.txt": page({name: read(text) for name, text in (one.split(": ", 1) for one in FORMS)}),
    })  # fmt: skip


WISHES = (
    {"gpus_per_task": 8, "cpus": 6}, {"mem": "0"}, {"sbatch": ("--time=unlimited",)}, {"tasks": 7, "parallel": 2},
    {"account": "a", "constraint": "c", "time": "5"}, {"sbatch": ("--array=3,7%1 --gres=gpu:2",), "parallel": 4},
)  # fmt: skip


def test_options_on_the_command_line_win_and_a_script_is_known_by_its_ending(pages: Pages) -> None:
    found = {}
    for wishes in WISHES:
        options, known = submit_words(SubmitSettings(**wishes)), {"SBATCH_TIMELIMIT": "60"}
        found[str(wishes)] = [options, read_script(WHOLE, "job.sbatch", known, options=options).asked]
    pages({"asked.txt": page(found)})
    assert [is_job_script(name) for name in ("a.sbatch", "b.sh", "c.csv", "sbatch")] == [True, True, False, False]
    lines = ("srun -n1 x", "X=1 exec /bin/srun x", "# srun", 'echo "srun"')
    assert [find_srun(script("echo a", one)) for one in lines] == [3, 3, None, None]


# --- the emulation ----------------------------------------------------------------------------------------------------


def requested(text: str, *options: str) -> Any:
    try:
        found = read_request(text, options)
    except BadInput as error:
        return str(error).splitlines()
    more = {"ignored": found.ignored, "cores": found.cores, "indices": found.indices}
    return {key: one for key, one in {**brief(found), **more}.items() if key != "given"}


def test_what_the_emulation_makes_of_a_request_and_what_it_refuses(pages: Pages) -> None:
    texts = {
        one: requested(script("# why", f"#SBATCH {one}", "", "##SBATCH -t 9", "ls", "#SBATCH -t 7")) for one in REQUESTS
    }
    texts["options win"] = requested(script("#SBATCH --array=0-3 --gpus-per-node=4"), "--array=7", "--gpus-per-node=1")
    for path in sorted(folder("templates").glob("*.sbatch")):
        texts[path.name] = requested(path.read_text())
    texts["no interpreter"] = requested("echo hello\n")
    pages({"requests.txt": page(texts)})
