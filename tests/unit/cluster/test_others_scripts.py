"""Job scripts as other people write them, checked for Sockeye: every finding is true, and there are no others."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from rooms.cli import app, make_parser
from rooms.planning import Checked, CheckOrder, Remark, check
from rooms.root import RunSettings, SubmitSettings, SystemClock, folder
from support.audio import make_wav
from support.badcjobs_program import MANIFEST_HEADER

PARSE = make_parser(typer.main.get_command(app))
MODULES = """
module() {
    case $1 in
        load) shift; LOADED="$LOADED $*" ;;
        -t) for one in $LOADED; do echo "$one/1.0"; done >&2 ;;
    esac
}
"""
HEAD = """#!/bin/bash
#SBATCH --account=st-lab-1-gpu --time=12:00:00 --mem=16G
#SBATCH --gpus-per-node=4 --cpus-per-task=24
#SBATCH --signal=B:USR1@180 --open-mode=append
"""
LOAD = "module load gcc cuda\n"
RUN = "badcjobs run manifest.csv --out results --engine demo"


@dataclass
class Sockeye:
    """A machine with Sockeye's rules, its scratch in a folder of ours, and somebody who is there."""

    root: Path

    def __post_init__(self) -> None:
        for name in ("scratch/jobs", "scratch/july", "home", "bin"):
            (self.root / name).mkdir(parents=True)
        make_wav(self.root / "scratch" / "a.wav")
        rows = "".join(f"r,c{number},{self.root}/scratch/a.wav,0,600,0,,\n" for number in range(4))
        for name in ("jobs/manifest.csv", "jobs/other.csv", "jobs/m.csv", "july/manifest.csv"):
            (self.root / "scratch" / name).write_text(f"{MANIFEST_HEADER}\n{rows}")
        (self.root / "home/.bash_profile").write_text(MODULES)
        (self.root / "bin/bash").symlink_to(shutil.which("bash") or "/bin/bash")
        rules = (folder("sites") / "sockeye.toml").read_text().replace("/scratch", str(self.root / "scratch"))
        (self.root / "site.toml").write_text(rules)

    def check(self, text: str, submit: SubmitSettings | None = None, **environ: str) -> Checked:
        work = self.root / "scratch" / "jobs"
        (work / "job.sbatch").write_text(text, newline="")
        known = {"HOME": str(self.root / "home"), "PATH": str(self.root / "bin"), **environ}
        site = str(self.root / "site.toml")
        of_submit = submit or SubmitSettings()
        order = CheckOrder(RunSettings(), known, SystemClock(), work, of_submit, site, "job.sbatch", parse=PARSE)
        return check(order)

    def findings(self, text: str, **environ: str) -> list[Remark]:
        return [one for one in self.check(text, **environ).findings if one.severity != "fine"]


@pytest.fixture
def sockeye(tmp_path: Path) -> Sockeye:
    return Sockeye(tmp_path)


# what it is → the script, and what is to be found in it: nothing else may be
SCRIPTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "as it should be": (HEAD + LOAD + f"exec {RUN}\n", []),
    "modules in two lines, one with a remark": (
        HEAD + f"module purge; module load gcc/9.4 # first\nmodule load cuda 2>/dev/null || true\nexec {RUN}\n",
        [],
    ),
    "a folder of its own, made before": (
        HEAD + LOAD + 'WORK="{scratch}/july"\nmkdir -p "$WORK" && cd "$WORK" || exit 1\nexec ' + RUN + "\n",
        [],
    ),
    "with a program beside it that records": (
        HEAD + LOAD + "srun --overlap badcjobs record --out gpus.sqlite &\nexec " + RUN + "\n",
        [],
    ),
    "that only records": (
        HEAD.replace("B:", "") + LOAD + "srun --overlap badcjobs record --out gpus.sqlite &\nsrun python train.py\n",
        [],
    ),
    "several nodes": (
        HEAD.replace("B:", "").replace("--gpus", "--nodes=2 --gpus") + LOAD + f"srun --ntasks-per-node=1 {RUN}\n",
        [],
    ),
    "several nodes, one of them at work": (
        HEAD.replace("--gpus", "--nodes=2 --gpus") + LOAD + f"exec {RUN}\n",
        [("warning", "nodes")],
    ),
    "the command as an array": (
        HEAD + LOAD + 'CMD=(badcjobs run manifest.csv\n  --out results  # there\n  --engine demo)\nexec "${CMD[@]}"\n',
        [],
    ),
    "two branches": (
        HEAD + LOAD + f'if [[ -n "$TEST" ]]; then\n  exec {RUN} --max-gpus 1\nelse\n  exec {RUN}\nfi\n',
        [],
    ),
    "with a trap that passes the signal on": (
        HEAD + LOAD + f"{RUN} &\npid=$!\ntrap 'kill -USR1 $pid; wait $pid' USR1\nwait $pid\n",
        [],
    ),
    "into a pipeline": (HEAD + LOAD + f"exec {RUN} 2>&1 | tee log.txt\n", [("problem", "start")]),
    "a step into a pipeline that fails with it": (
        HEAD.replace("B:", "") + "set -euo pipefail\n" + LOAD + f"srun {RUN} | tee log.txt\n",
        [],
    ),
    "one manifest after the other": (
        HEAD + LOAD + "for m in *.csv; do\n  badcjobs run $m --out results --engine demo\ndone\n",
        [("problem", "start")],
    ),
    "two runs": (HEAD + LOAD + f"{RUN}\n{RUN.replace('manifest', 'other')}\n", [("problem", "start")]),
    "through another shell": (HEAD + LOAD + f"srun bash -c '{RUN} --shard $SLURM_PROCID/2'\n", []),
    "that writes a script and submits it": (
        HEAD + LOAD + f"cat > next.sbatch <<EOF\n#!/bin/bash\n#SBATCH --time=1\n{RUN}\nEOF\nexec {RUN}\n",
        [],
    ),
    "in an image": (
        HEAD + "module load gcc apptainer\nexec apptainer exec --nv birds.sif badcjobs run m.csv --out results\n",
        [],
    ),
    "with an engine from conda": (
        HEAD + LOAD + "source ~/miniconda3/etc/profile.d/conda.sh\nconda activate birds\n"
        "exec badcjobs run m.csv --out results\n",
        [("warning", "engine")],
    ),
    "with arguments from outside": (
        HEAD + LOAD + 'exec badcjobs run "$1" --out "$2" $EXTRA\n',
        [("warning", "engine")],
    ),
    "a folder nobody knows": (HEAD + LOAD + 'cd "$(mktemp -d)"\nexec ' + RUN + "\n", []),
    "whole nodes": (
        HEAD.replace("--gpus-per-node=4", "--exclusive").replace("--mem=16G", "--mem=0") + LOAD + f"exec {RUN}\n",
        [],
    ),
    "two kinds of nodes": (HEAD + "#SBATCH hetjob\n#SBATCH --mem=64G --gpus-per-node=0\n" + LOAD + f"exec {RUN}\n", []),
    "in Python": (
        HEAD.replace("/bin/bash", "/usr/bin/env python3") + 'import os\nos.execvp("badcjobs", ["badcjobs", "run"])\n',
        [],
    ),
    "a merge": (
        "#!/bin/bash\n#SBATCH --account=st-lab-1 --mem=4G --time=1:00:00\nmodule load gcc\nbadcjobs merge results\n",
        [],
    ),
    "an analysis after another job": (HEAD + "#SBATCH --dependency=afterok:123\n" + LOAD + f"exec {RUN}\n", []),
    "a merge after the success of an array": (
        "#!/bin/bash\n#SBATCH --account=st-lab-1 --mem=4G --time=1:00:00 -d afterok:123\nmodule load gcc\n"
        "badcjobs merge results\n",
        [("warning", "dependency")],
    ),
    "a source that is not there": (HEAD + LOAD + f"exec {RUN.replace('manifest', 'gone')}\n", [("problem", "source")]),
    "a source that it makes": (
        HEAD + LOAD + f"find . -name '*.wav' > gone.csv\nexec {RUN.replace('manifest', 'gone')}\n",
        [],
    ),
    "a source that is not there, behind harmless commands": (
        HEAD + "set -e\n" + LOAD + 'mkdir -p logs; echo "on $HOSTNAME" >&2\nexport A=1\n'
        'case $PWD in "$HOME" | "$HOME"/*) echo no; exit 2 ;; esac\nrefuse() { echo no >&2; exit 2; }\n'
        f'[[ -n $HOME ]] || refuse\ncommand -v badcjobs >/dev/null || refuse\nexec {RUN.replace("manifest", "gone")}\n',
        [("problem", "source")],
    ),
    "sources by a pattern": (HEAD + LOAD + f"exec {RUN.replace('manifest', '*')}\n", []),
    "a source behind a flag, and one behind --": (
        HEAD + LOAD + "exec badcjobs run --no-resume --out=results m.csv --engine demo --retries 5 -- other.csv\n",
        [("problem", "source")],  # the same chunk in both
    ),
    "a command that there is not": (HEAD + LOAD + f"exec {RUN.replace('run', 'runn')}\n", [("problem", "call")]),
    "a flag that there is not": (HEAD + LOAD + f"exec {RUN} --nosuchflag 3\n", [("problem", "call")]),
    "a flag without its value": (HEAD + LOAD + f"exec {RUN} --retries\n", [("problem", "call")]),
    "a flag that takes none": (HEAD + LOAD + f"exec {RUN} --resume=yes\n", [("problem", "call")]),
    "two mistakes in two calls": (
        HEAD + LOAD + f"badcjobs gpus --jsn\nexec {RUN} --max-gpu 2\n",
        [("problem", "call"), ("problem", "call")],
    ),
    "no place for the results": (
        HEAD + LOAD + "exec badcjobs run manifest.csv --engine demo\n",
        [("problem", "out")],
    ),
    "no source": (HEAD + LOAD + "exec badcjobs run --out results --engine demo\n", [("problem", "settings")]),
    "a number that is none": (
        HEAD + LOAD + f"exec {RUN} --retries many --config run.stage=maybe\n",
        [("problem", "config"), ("problem", "settings")],
    ),
    "an engine that there is not": (
        HEAD + "#SBATCH --time=200:00:00\n" + LOAD + f"exec {RUN.replace('demo', 'hawkear')}\n",
        [("problem", "time"), ("problem", "settings")],  # and whatever else is wrong
    ),
    "a folder and a job of the same name": (
        HEAD + LOAD + "cp -r /opt/badcjobs code\npip install -U badcjobs numpy\nsrun -J badcjobs python x.py\n"
        f"cd /tmp/badcjobs; cd {{scratch}}/jobs\nexec {RUN}\n",
        [],
    ),
    "an image of the same name": (
        HEAD + "module load gcc apptainer\n"
        "exec apptainer exec --bind /opt/badcjobs badcjobs python -m badcjobs run m.csv --out results\n",
        [],
    ),
    "flags out of a variable": (HEAD + LOAD + f'exec {RUN} $EXTRA --engine-arg --what "$@" --ever\n', []),
    "options as comments": (
        HEAD + "# SBATCH --nice\n##SBATCH --qos=high\n  #SBATCH --nice=3\n# sbatch -x\n" + LOAD + f"exec {RUN}\n",
        [("warning", "script"), ("warning", "script")],
    ),
    "indices as a list": (HEAD + "#SBATCH -a 1,3,5,7%2\n" + LOAD + f"exec {RUN}\n", [("problem", "array")]),
    "indices as a list, and parts of its own": (
        HEAD + "#SBATCH -a 1,3,5,7\n" + LOAD + f"exec {RUN} --shard $((SLURM_ARRAY_TASK_ID / 2))/4\n",
        [],
    ),
    "no folder for the log": (
        HEAD + "#SBATCH --output=logs/%j.log\n" + LOAD + f"exec {RUN}\n", [("problem", "log folder")]
    ),
    "no folder for the errors": (
        HEAD + "#SBATCH -e logs/%j.err\n" + LOAD + f"exec {RUN}\n", [("problem", "log folder")]
    ),
    "another program's job": (HEAD + LOAD + "python train.py\n", [("warning", "start")]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_that_check_says_about_a_script_is_false(sockeye: Sockeye, name: str) -> None:
    text, expected = SCRIPTS[name]
    found = sockeye.findings(text.replace("{scratch}", str(sockeye.root / "scratch")))
    assert [(one.severity, one.subject) for one in found] == expected, [one.text for one in found]


def test_a_start_that_is_not_the_shells_own_is_explained_with_what_to_write_instead(sockeye: Sockeye) -> None:
    (found,) = sockeye.findings(HEAD + LOAD + f"exec {RUN} 2>&1 | tee log.txt\n")
    assert "line 6 starts badcjobs in a pipeline" in found.text
    assert "USR1" in found.text
    assert (found.fix or "").startswith(f"exec {RUN} 2>&1   (")
    assert sockeye.findings(HEAD + LOAD + (found.fix or "").partition("   (")[0] + "\n") == []


def test_what_the_environment_says_goes_before_the_script_as_in_sbatch(sockeye: Sockeye) -> None:
    text = HEAD + LOAD + f"exec {RUN}\n"
    assert sockeye.check(text, SBATCH_TIMELIMIT="1:00:00").asked.time_s == 3600
    (found,) = sockeye.findings(text, SBATCH_ACCOUNT="st-lab-1")
    assert found.subject == "account"


@pytest.mark.parametrize(("export", "out"), [("ALL", "elsewhere"), ("NONE", "results"), ("NONE,OUT=third", "third")])
def test_only_variables_that_sbatch_hands_on_count(sockeye: Sockeye, export: str, out: str) -> None:
    head = HEAD + f"#SBATCH --export={export}\n" + LOAD
    text = head + ': "${OUT:=results}"\nexec badcjobs run m.csv --engine demo --out "$OUT"\n'
    found = {one.subject: one.text for one in sockeye.check(text, OUT="elsewhere").findings}
    assert f"/jobs/{out} can be written" in found["out"]


def test_the_settings_file_of_a_script_names_its_engine(sockeye: Sockeye) -> None:
    (sockeye.root / "scratch" / "jobs" / "run.toml").write_text('[run]\nengine = "demo"\n')
    text = HEAD + LOAD + "exec badcjobs run m.csv --out results --config run.toml\n"
    assert sockeye.findings(text) == []
    (found,) = sockeye.findings(text.replace("run.toml", "gone.toml"))
    assert (found.severity, found.subject) == ("problem", "config")
    assert "gone.toml does not exist" in found.text


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (SubmitSettings(gpus_per_task=8, cpus=6), {"gpus_per_task": 8, "gpus_per_node": 8, "cpus": 6}),
        (SubmitSettings(mem="0"), {"memory_gb_per_node": 0}),  # all of the node, which is not the same as not set
        (SubmitSettings(sbatch=("--time=unlimited",)), {"time_s": None, "no_time_limit": True}),
        (SubmitSettings(tasks=7), {"tasks": 7, "last_index": 6}),
        (SubmitSettings(sbatch=("--array=3,7 --gres=gpu:2",)), {"tasks": 2, "last_index": 7, "gpus_per_task": 2}),
    ],
)
def test_the_command_line_goes_before_the_script(
    sockeye: Sockeye, said: SubmitSettings, expected: dict[str, object]
) -> None:
    asked = sockeye.check(HEAD + LOAD + f"exec {RUN}\n", said).asked
    assert {name: getattr(asked, name) for name in expected} == expected


def test_a_virtual_environment_that_a_script_activates_is_searched_for_the_engine(sockeye: Sockeye) -> None:
    venv = sockeye.root / "scratch" / "venv"
    start = "exec badcjobs run m.csv --out o --engine command --command 'sing {input} {output}'"
    text = f"{HEAD}{LOAD}V={venv}\nsource $V/bin/activate\n{start}\n"
    assert [(one.severity, one.subject) for one in sockeye.findings(text)] == [("problem", "engine")]
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "sing").write_text("#!/bin/sh\n")
    (venv / "bin" / "sing").chmod(0o755)
    assert sockeye.findings(text) == []


# what stands in the script → the line that mends it
RIGHT = "exec badcjobs run manifest.csv --out results"
MENDED = {
    RIGHT.replace("run", "runn"): RIGHT,
    f"{RIGHT} --max-gpu 2": f"{RIGHT} --max-gpus 2",
    f"{RIGHT} --nosuchflag 3": "badcjobs run --help",
    RIGHT.replace("run", "--debugg run"): RIGHT.replace("run", "--debug run"),
    f"{RIGHT} --resume=yes": f"{RIGHT} --resume",
    f"{RIGHT} --retries": "badcjobs run --help",
    f"{RIGHT} --grace 5": f"{RIGHT} --config run.grace_s=5",
    "exec badcjobs zebra": "badcjobs --help",
    "exec badcjobs run manifest.csv": RIGHT,
    f"{RIGHT} --engine demmo": f"{RIGHT} --engine demo",
}


@pytest.mark.parametrize("line", MENDED)
def test_a_call_of_badcjobs_that_would_be_refused_comes_with_the_line_as_it_should_be(
    sockeye: Sockeye, line: str
) -> None:
    checked = sockeye.check(HEAD + LOAD + line + "\n")
    found = next(one for one in checked.findings if one.severity == "problem" and "line 6" in one.text)
    assert found.fix == MENDED[line]
    assert checked.exit_code == 1


def test_a_source_of_the_script_is_read_like_one_that_is_given_to_check(sockeye: Sockeye) -> None:
    text = HEAD + LOAD + f"exec {RUN}\n"
    source = sockeye.check(text).source
    assert source is not None
    assert source.chunks == 4
    (gone,) = sockeye.findings(text.replace("manifest", "gone"))
    assert f"{sockeye.root}/scratch/jobs/gone.csv does not exist" in gone.text
    hidden = sockeye.check(text.replace("manifest.csv", '"$1"'))
    (said,) = [one for one in hidden.findings if one.subject == "source"]
    assert (said.severity, hidden.source) == ("fine", None)
    assert said.text.startswith("not checked: the source in line 6 cannot be read from here")
    assert "badcjobs check job.sbatch SOURCE" in said.text


def test_a_source_of_an_image_is_read_only_where_it_is_the_same_outside(sockeye: Sockeye) -> None:
    text = HEAD + "module load gcc apptainer\nexec apptainer exec birds.sif badcjobs run m.csv --out results\n"
    assert sockeye.check(text).source is not None
    inside = sockeye.check(text.replace("m.csv", "/mnt/m.csv"))
    assert (inside.source, inside.exit_code) == (None, 0)
    assert any("the source in line 6 is inside an image" in one.text for one in inside.findings)


def test_after_cd_relative_paths_are_not_looked_at(sockeye: Sockeye) -> None:
    found = sockeye.check(HEAD + LOAD + f"cd ../elsewhere\nexec {RUN.replace('manifest', 'gone')}\n")
    assert (found.source, found.exit_code) == (None, 0)
    assert any(one.text.startswith("not checked: the source in line 7") for one in found.findings)


def test_a_call_that_cannot_be_read_is_named(sockeye: Sockeye) -> None:
    found = sockeye.check(HEAD + LOAD + f"srun bash -c '{RUN} --shard $SLURM_PROCID/2'\n")
    (said,) = [one for one in found.findings if one.subject == "start"]
    assert said.text == "not checked: line 6 of job.sbatch names badcjobs in a way that cannot be read here"


@pytest.mark.parametrize(
    ("array", "fix"),
    [
        ("1,3,5,7", "#SBATCH --array=1-7:2"),
        ("7,5,3,1%2", "#SBATCH --array=1-7:2%2"),
        ("1,2,6,7", "#SBATCH --array=0-3"),
        ("0-3", None),
        ("1,2,3,4", None),
        ("3", None),
        ("0-2:2,4-6:2", None),
    ],
)
def test_an_array_whose_tasks_could_not_know_their_shares_is_told_the_range(
    sockeye: Sockeye, array: str, fix: str | None
) -> None:
    text = HEAD + f"#SBATCH --array={array}\n" + LOAD + f"exec {RUN}\n"
    found = [one for one in sockeye.findings(text) if one.subject == "array"]
    assert [(one.severity, one.fix) for one in found] == ([("problem", fix)] if fix else [])
    assert all(f"--array={array} is a list, and Slurm hides the spacing" in one.text for one in found)


def test_a_part_of_a_run_that_has_begun_may_be_any_list_of_its_indices(sockeye: Sockeye) -> None:
    work = sockeye.root / "scratch" / "jobs"
    (work / "results").mkdir()
    source = f'source = ["{work}/manifest.csv"]'
    (work / "results" / "run.toml").write_text(
        f'written_by = "badcjobs 0"\n[run]\n{source}\n[array]\nfirst = 1\nstep = 2\ncount = 4\n'
    )
    text = HEAD + "#SBATCH --array=1,7\n" + LOAD + f"exec {RUN}\n"
    assert sockeye.findings(text) == []
    (found,) = sockeye.findings(text.replace("1,7", "1,4"))
    assert (found.severity, found.subject) == ("problem", "run.toml")
    assert "the array 1-7:2" in found.text


def test_where_nobody_knows_the_folder_of_the_run_a_list_of_indices_is_a_warning(sockeye: Sockeye) -> None:
    text = HEAD + "#SBATCH --array=1,3,5\n" + LOAD + f"exec {RUN.replace('results', '$1')}\n"
    (found,) = [one for one in sockeye.findings(text) if one.subject == "array"]
    assert (found.severity, found.fix) == ("warning", "#SBATCH --array=1-5:2")
    assert "in a run that has begun already" in found.text


# what is wrong with the head of the script → the line that mends it
HEADS = {
    HEAD.removeprefix("#!/bin/bash\n"): "sed -i '1i #!/bin/bash' job.sbatch",
    HEAD.replace("\n", "\r\n"): r"sed -i 's/\r$//' job.sbatch",
    HEAD.replace("--gpus-per-node", "--gpus-pernode"): "#SBATCH --gpus-per-node=4 --cpus-per-task=24",
    HEAD + "#SBATCH --birds\n": "sed -i 5d job.sbatch",
    HEAD + "#SBATCH --birds --nice\n": "#SBATCH --nice",
    HEAD.replace("12:00:00", "noon"): "#SBATCH --account=st-lab-1-gpu --time=12:00:00 --mem=16G",
    HEAD + "#SBATCH --array=9-0\n": "#SBATCH --array=0-9",
    HEAD + "#SBATCH -a 9-0\n": "#SBATCH --array=0-9",
    HEAD + "#SBATCH --comment='two words\n": "#SBATCH --comment='two words'",
    HEAD + "cd .\n#SBATCH --qos=x\n": "sed -i -e '6d' -e '1a #SBATCH --qos=x' job.sbatch   (moves it above)",
}


@pytest.mark.parametrize("head", HEADS)
def test_what_sbatch_would_refuse_comes_with_the_line_that_mends_it(sockeye: Sockeye, head: str) -> None:
    found = [one for one in sockeye.findings(head + LOAD + f"exec {RUN}\n") if one.subject == "script"]
    assert [(one.severity, one.fix) for one in found] == [("problem", HEADS[head])]
    assert found[0].text.startswith("job.sbatch")


@pytest.mark.parametrize("head", [one for one, fix in HEADS.items() if fix.startswith("sed")])
def test_a_program_that_mends_a_script_really_does(sockeye: Sockeye, head: str) -> None:
    text = head + LOAD + f"exec {RUN}\n"
    (found,) = [one for one in sockeye.findings(text) if one.subject == "script"]
    script = sockeye.root / "scratch" / "jobs" / "job.sbatch"
    subprocess.run(["bash", "-c", (found.fix or "").partition("   (")[0]], cwd=script.parent, check=True)
    with script.open(newline="") as file:
        mended = file.read()
    assert mended != text
    assert [one for one in sockeye.findings(mended) if one.subject == "script"] == []


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("# SBATCH --mem=64G", "#SBATCH --mem=64G   (or ##SBATCH for a comment)"),
        (" #SBATCH --mem=64G", "#SBATCH --mem=64G   (or ##SBATCH for a comment)"),
        ("#sbatch --mem=64G", "#SBATCH --mem=64G   (or ##SBATCH for a comment)"),
        ("##SBATCH --mem=64G", None),
        ("# SBATCH lines come first", None),
        ("#     sbatch --array=0-9 job.sbatch", None),
    ],
)
def test_a_comment_that_looks_like_an_option_is_shown_as_it_should_be(
    sockeye: Sockeye, line: str, fix: str | None
) -> None:
    found = sockeye.findings(HEAD + line + "\n" + LOAD + f"exec {RUN}\n")
    assert [(one.severity, one.fix) for one in found] == ([("warning", fix)] if fix else [])
    assert all("job.sbatch line 5: sbatch reads this as a comment" in one.text for one in found)
