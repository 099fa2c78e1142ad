"""Job scripts as sbatch and a shell read them: options, calls of badcjobs, mistakes; and what the emulation asks.

The inputs stand here, what is understood of them in the pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rooms.cli import app, make_parser
from rooms.cluster import find_srun, is_job_script, read_request, read_script
from rooms.root import BadInput, folder
from support.brief import brief, page
from support.pages import Pages

PARSE = make_parser(typer.main.get_command(app))
LINES = (Path(__file__).parents[2] / "data" / "job_lines.txt").read_text().replace("⏎", "\v").split("# --- ")[1:]
CALLS, OPTIONS, REQUESTS = ([one.replace("\v", "\n") for one in part.split("\n")[1:-1]] for part in LINES)
WHOLE = """#!/bin/bash
#SBATCH --account=st-lab-1-gpu --array=0-99%10
#SBATCH --gpus-per-node=4 -c 24   # all of a node
#SBATCH --mem=64G -t 3-00:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
#SBATCH --output=/scratch/st-lab-1/%x-%A_%a.out

module load gcc cuda/11.8
ml add -q python/3.11 ; module load "$X" 2>/dev/null
source /venvs/$NAME/bin/activate
trap 'kill $child' USR1
export TMPDIR=/local
: "${SOURCE:=manifest.csv}"
: "${OUT:=/scratch/st-lab-1/july}"
HK=/scratch/st-lab-1/hawkears
ARGS=(
    --workers-per-gpu auto # as many as pay
    --hawkears-root "$HK/root"
)
read -r -a MORE <<<"${BADCJOBS_ARGS:---max-gpus 2}"
cat > note.txt <<EOF
exec badcjobs run nothing
EOF
badcjobs gpus --json
exec "$BADCJOBS" run "$SOURCE" --out "$OUT" \\
    "${ARGS[@]}" "${MORE[@]}" --config=run.grace_s=12
"""
FORMS = {
    "no interpreter": "#SBATCH --time=60\nexec badcjobs run x\n",
    "DOS": "#!/bin/bash\r\nexec badcjobs run x\r\n",
    "late": "#!/bin/bash\n#SBATCH --mem=1G\ncd /x\n#SBATCH --open-mode=append\n#SBATCH --nice\n",
    "near": "#!/bin/sh\n# SBATCH --mem=64G\n #SBATCH -q x\n#sbatch -x\n##SBATCH --a\n# SBATCH is\n#  sbatch -b\nls\n",
    "two jobs": "#!/bin/bash\n#SBATCH --mem=1G\n#SBATCH hetjob\n#SBATCH --mem=9G --gpus=2\nexec badcjobs run x\n",
    "python": "#!/usr/bin/env python3\n#SBATCH --mem=1G\nos.execvp('badcjobs', ['badcjobs', 'run'])\n",
    "comment behind": "#!/bin/sh\n#SBATCH --mem=1G # of birds\n\n# why\n#SBATCH --nice\nls\n",
}


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
        "forms.txt": page({name: read(text) for name, text in FORMS.items()}),
    })  # fmt: skip


def test_options_on_the_command_line_win_and_a_script_is_known_by_its_ending() -> None:
    found = read_script(WHOLE, "job.sbatch", {"SBATCH_TIMELIMIT": "60"}, options=("--time=5", "--mem", "1G", "-c4"))
    assert (found.asked.time_s, found.asked.memory_gb_per_node, found.asked.cpus) == (300, 1, 4)
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
