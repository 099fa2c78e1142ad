"""Job scripts as sbatch and a shell read them: options, calls of badcjobs, mistakes; and what the emulation asks.

The inputs stand here, what is understood of them in the pages.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from rooms.cli import app, make_parser
from rooms.cluster import find_srun, is_job_script, read_request, read_script
from rooms.root import BadInput, folder
from support.brief import brief, line, page
from support.pages import Pages

PARSE = make_parser(typer.main.get_command(app))
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
CALLS = (
    "badcjobs run m.csv --out o", "exec /opt/venv/bin/badcjobs run m.csv", "exec python3.11 -m badcjobs run m.csv",
    'exec "${BADCJOBS}" run m.csv', "exec srun --ntasks-per-node=1 badcjobs run m.csv", "srun badcjobs run m.csv",
    "OMP_NUM_THREADS=2 exec badcjobs run m.csv", "exec apptainer exec --nv image.sif badcjobs run m.csv",
    "mpirun -n 2 badcjobs run m.csv", "cd x; badcjobs run m.csv", "exec badcjobs run m.csv > log 2>&1",
    'CMD=(badcjobs run "a b.csv" --out o)\nexec "${CMD[@]}"', "if true; then exec badcjobs run m.csv; fi",
    "exec timeout 3h badcjobs --debug run m.csv", "exec timeout -s USR1 100 badcjobs run m.csv",
    "exec /usr/bin/time -v badcjobs run m.csv", "exec conda run -n birds badcjobs run m.csv",
    "exec badcjobs run m.csv 2>&1 | tee log", "badcjobs run m.csv &", "a || badcjobs run m.csv && b",
    "cat x | badcjobs run m.csv", "exec badcjobs run *.csv --engine demo", "exec badcjobs run $1 --out $2/x $EXTRA",
    'exec badcjobs run "$@"', "exec badcjobs run $SLURM_JOB_ID.csv --out ~/x", "exec badcjobs run ~bob/m.csv",
    "A=x\nA=y\nexec badcjobs run $A", "A=$(date)\nexec badcjobs run m.csv --out $A", "A='two words'\nbadcjobs run $A",
    "exec badcjobs run ${A:-some.csv} ${B-b.csv} --config run.toml --config run.retries=3",
    "exec badcjobs run `ls` --config $X.toml", "find . > made.csv\nexec badcjobs run made.csv",
    "cd /x\nbadcjobs run m.csv",
    "cd $SLURM_SUBMIT_DIR\nbadcjobs run m.csv /abs.csv", "exec badcjobs run m.csv --cpu-workers 2 --no-resume",
    "exec badcjobs merge out", "badcjobs record --out x & exec badcjobs run m.csv", "exec badcjobs runn m.csv",
    "exec badcjobs run m.csv --max-gpu 2", "exec badcjobs run m.csv --retries", "exec badcjobs run m.csv --max-gpu $X",
    "# exec badcjobs run m.csv", "echo badcjobs run m.csv", "true # badcjobs run", "MSG='badcjobs run'", "ls",
    "srun bash -c 'badcjobs run m.csv'", "pip install badcjobs numpy", "cat <<EOF\nexec badcjobs run m\nEOF\nls",
    "cp -r /opt/badcjobs code", "exec apptainer exec --bind /opt/badcjobs badcjobs python -m badcjobs run m.csv",
    "nohup badcjobs --version", "exec env A=1 nice -n 5 badcjobs run m.csv --out=$PWD/o",
    ': "${OUT:=/a \\}b\\"c}"\nbadcjobs run m --out "$OUT"', "module load miniforge3", "conda activate birds",
    "unset TMPDIR",
)  # fmt: skip
OPTIONS = (
    "--gres=gpu:v100:2", "--gpus=v100:1,a100:2", "-N 2 --gpus-per-node=4", "-N 2 --gres=gpu:4", "-N 2 --gpus=5",
    "--gpus=8", "-N2 --ntasks-per-node=4 --gpus-per-task=1", "-n 1 --gpus-per-task=2", "--exclusive",
    "--exclusive --gpus-per-node=2", "--tres-per-task=gres/gpu:1", "--gres=tmp:10G --gpus=2", "--nodes=2-4",
    "-N2 --ntasks-per-node=2 -c 6", "-N2 -n4 -c 6", "-n 48 -c 1", "-n3 -N2 -c1", "--cpus-per-gpu=3 --gpus=2",
    "-N2 --mem=16G",
    "-N2 --gpus-per-node=4 --mem-per-gpu=4G", "--mem-per-gpu=8G --gpus=2", "--mem-per-cpu=2000M -c 4",
    "--mem-per-cpu=1G -n2", "--mem=0", "--mem=1G --mem-per-cpu=9G", "--array=1,3,7-9", "--array=10-100:10%4", "-t 90",
    "--time=UNLIMITED", "--time=0", "-t infinite", "-Ast-x-1 -p gpu,short -C v100", "--clusters=x -p gpu --gpus=1",
    "-w n1,n2 -x n[3-4]", "-w /etc/nodes -x n3", "--signal=RB:USR1@9", "--time 5 --comment='a b' --nice -H",
    "--gpus-pernode=4", "--birds", "--birds --nice", "--time=noon", "--array=9-0", "-a 9-0", "--signal=B:BIRD@60",
    "--mem=lots", "--gpus-per-task=1", "--gpus=many", "--ntasks=0", "-c 0", "-Z", "--job-name='x", "--gres=none",
)  # fmt: skip
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

REQUESTS = (
    "--time=5", "-c2 --gpus-per-node=2 -a 0-3 -J probe", "--time=5:30", "--time=1-2:30", "--time=UNLIMITED",
    "--time=0:00",
    "--signal=B:USR1@180", "--signal=10@5", "--signal=TERM", "--gpus-per-node=v100:2", "-G2",
    "--gres=gpu:a100:2,shard:4",
    "--gres=gpu", "--gres=gpu:a100", "--gpus-per-task=2 --ntasks=2", "--gpus-per-task=1 -N1",
    "--gpus-per-task=1 --ntasks-per-node=2", "--gpus=2 --gpus-per-node=2", "--gres=gres:gpu:2", "--gpus-per-node=0",
    "-o %x-%A_%a.log -e err --open-mode=append --export=ALL,A=1,B='x,y',C=,D --no-requeue -D sub", "--export=ALL",
    "--account=st-x-gpu --mem=16G --constraint=gpu_mem_32 -p gpu --hold --comment=x", "--mem=4096", "--mem=1T",
    "--mem=1500K", "--mem=+1gb", "--mem=0", "-n2 -c4", "--ntasks-per-node=2 -c3", "--nodes=1-2",
    "--time=x --nodes=2 --cpus-per-task=none --array=5-2 nonsense", "--signal=XX", "--time", "--comment=don't",
    "--ntasks=0", "--mem=1.5G", "--gpus=2 --gpus-per-node=1", "--gres=gpu:2 --gpus=1", "-N2", "--arr=0-4",
    "--exclusive", "--wrap=hostname", "--input=a.txt", "--export=NONE", "--gpus-per-node=x",
)  # fmt: skip


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


# --- mistakes are mended by the line that is named --------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "#SBATCH --mem=1G\nbadcjobs run x\n", "#!/bin/bash\r\n#SBATCH --mem=1G\r\nbadcjobs run x\r\n",
        "#!/bin/bash\n#SBATCH --birds\nls\n", "#!/bin/bash\n#SBATCH --mem=1G\ncd .\n#SBATCH --qos=x\nls\n",
    ],
    ids=["no interpreter", "DOS", "no such option", "too late"],
)  # fmt: skip
def test_a_program_that_mends_a_script_really_does(tmp_path: Path, text: str) -> None:
    job = tmp_path / "job.sbatch"
    job.write_text(text, newline="")
    (mistake,) = read_script(text, "job.sbatch", {}).mistakes
    subprocess.run(["bash", "-c", mistake.fix.partition("   (")[0]], cwd=tmp_path, check=True)
    mended = job.read_bytes().decode()
    assert mended != text
    assert read_script(mended, "job.sbatch", {}).mistakes == (), line(mended)
