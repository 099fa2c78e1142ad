"""``badcjobs check`` on a login node with Sockeye's rules: each finding comes with a fix, and pasted, the fix helps.

The site is Sockeye's own file with other folders in it; its programs (module, scontrol, nvidia-smi) are stand-ins.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from rooms.cli import app, make_parser
from rooms.cluster import fill_template, list_templates
from rooms.planning import Checked, CheckOrder, Remark, check
from rooms.root import BadInput, Project, RunSettings, SubmitSettings, SystemClock, folder
from support.audio import make_wav
from support.fake_hawkears import install_fake_hawkears, make_fake_root
from support.fake_nvidia_smi import FakeNvidiaSmi
from support.pages import Pages

PARSE = make_parser(typer.main.get_command(app))
RUN = "exec badcjobs run manifest.csv --out results --engine demo"
SCRIPT = f"""#!/bin/bash
#SBATCH --account=st-lab-1-gpu
#SBATCH --array=0-3
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=24
#SBATCH --mem=16G
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
module load gcc cuda
{RUN}
"""
MODULES = """
echo Welcome to the cluster
module() {
    case $1 in
        load) shift; for one in "$@"; do
            case $one in
                gcc|cuda|apptainer) LOADED="$LOADED $one/1.0" ;;
                *) echo "Lmod error: unknown: $one" >&2 ;;
            esac
        done ;;
        -t) for one in $LOADED; do echo "$one"; done >&2 ;;
    esac
}
"""
SCONTROL = "#!/bin/sh\ncat <<EOF\nConfiguration data as of {}\nKillWait = {} sec\nMaxArraySize = 1001\nEOF\n"
PROGRAMS = {  # folder on PATH → program, text
    "slurm": ("scontrol", SCONTROL.format("$(date +%s)", 30)),
    "hasty": ("scontrol", SCONTROL.format("$(date +%s)", 10)),
    "late": ("scontrol", SCONTROL.format("$(( $(date +%s) - 3600 ))", 30)),
    "early": ("scontrol", SCONTROL.format("$(( $(date +%s) + 30 ))", 30)),
    "silent": ("scontrol", "#!/bin/sh\necho 'Unable to contact' >&2; exit 1\n"),
    "nodes": (
        "sinfo",
        "#!/bin/sh\necho 'n1|gpu*|up|idle|infinite|0/64/0/64|gpu_mem_32,fast|gpu:v100:6|gpu:v100:0|180000|'\n",
    ),
    "strict": ("sbatch", "#!/bin/sh\n[ $1 = --test-only ] && echo 'allocation failure: Invalid account' >&2; exit 1\n"),
    "dead": ("sbatch", "#!/bin/sh\necho 'sbatch: error: Unable to contact slurm controller' >&2; exit 1\n"),
}
NODES = "nodes slurm"
MERGE = "#!/bin/bash\n#SBATCH --account=st-lab-1-gpu\nmodule load gcc\nexec badcjobs merge results\n"
ARRAY = "--array=0-3"
FROZEN = "[array]\nfirst = 0\nstep = 1\ncount = 4\n"
NO = {"pasted": False}  # what it says is a question, or asks for something outside of the script
# finding → cases: what is changed in the script, options of check, PATH and other variables
CASES: dict[str, list[dict[str, Any]]] = {
    "problem out": [
        {"out": "home/results"}, {"out": "/var/tmp/x"}, {"out": "a.wav/x", "site": "plain.toml", **NO},
        {"change": (" --out results", "")}],
    "problem submit folder": [{"HOME": ".", "mended": {"HOME": "home"}, **NO}],
    "problem log folder": [{"change": ("--open-mode", f"--output={log}/%j.log --open-mode")} for log in ("HERE/home",
        "logs")],
    "problem array": [{"change": (ARRAY, f"--array={array}"), "PATH": path} for array, path in (
        ("0-10000", ""), ("0-1001", "slurm"), ("1,3,5,7", ""))],
    "problem GPU-hours": [{"change": (ARRAY, "--array=0-99")}, {"change": (f"{ARRAY}\n", "--nodes=4\n"),
        "time": "168:00:00", **NO}],
    "problem files": [{"change": (ARRAY, "--array=0-1999999")}],
    "warning billing": [{"change": ("16G", "64G")}, {"change": ("16G", "4G --gpus-per-node=1")}],
    "problem GPUs": [{"change": ("node=4", "node=8")}, {"change": ("node=4", "node=9"), "site": "plain.toml",
        "PATH": NODES},
                     {"change": ("node=4", "node=a100:4"), "PATH": NODES}],
    "problem memory": [{"change": ("16G", "256G")}],
    "warning nodes": [{"change": (ARRAY, f"{ARRAY} --nodes=2")}],
    "warning GPUs": [{"change": ("#SBATCH --gpus-per-node=4\n", "")}, {"PATH": "smi", **NO}],
    "problem time": [{"change": ("12:00:00", time)} for time in ("unlimited", "200:00:00")],
    "problem modules": [{"change": ("cuda", "cuda birds"), **NO}],
    "warning modules": [{"change": ("gcc cuda", "cuda")}, {"HOME": "/nonexistent", "PATH": "bare", **NO}],
    "problem engine": [{"change": ("--engine demo", "--hawkears-root hawkears"), "mended": {"PATH": "hawkears-bin"},
        **NO},
                       {"change": ("--engine demo", "--hawkears-root empty"), "PATH": "hawkears-bin", **NO}],
    "warning engine": [{"change": (RUN, f"source setup.sh\n{RUN[:-14]}"), **NO},
                       {"change": ("--engine demo", "$BADCJOBS_ARGS"), **NO}],
    "fine engine": [{"change": ("--engine demo", "--hawkears-root hawkears"), "PATH": "hawkears-bin", **NO},
                    {"change": ("exec badcjobs", "exec apptainer exec --nv x.sif badcjobs"), **NO}],
    "warning live files": [{"TMPDIR": "/sys", "site": "plain.toml"}],
    "problem clock": [{"PATH": "late", "mended": {"PATH": "slurm"}, **NO}],
    "warning clock": [{"PATH": "early", **NO}],
    "warning Slurm": [{"PATH": "silent", **NO}],
    "warning grace": [{"PATH": "hasty", **NO}],
    "warning signal": [{"change": ("#SBATCH --signal=B:USR1@180\n", "")}],
    "problem signal": [{"change": ("@180", "@43200")}],
    "problem start": [{"change": ("exec ", "")}, {"change": ("--engine demo", "--engine demo | tee log")},
                      {"change": ("exec badcjobs", "exec timeout -k 5 100 badcjobs")}],
    "warning log": [{"change": ("#SBATCH --open-mode=append\n", "")}],
    "problem account": [{"change": ("-1-gpu", "-1")}],
    "problem script": [{"change": change} for change in (
        ("exec", "#SBATCH --qos=x\nexec"), ("\n", "\r\n"), ("#!/bin/bash\n", ""))] + [{"change": ("=16G",
            "=16G --birds"), **NO}],
    "warning script": [{"change": ("#SBATCH --mem", "# SBATCH --nice\n#SBATCH --mem"), **NO}],
    "warning dependency": [{"change": (
        f"module load gcc cuda\n{RUN}", "#SBATCH --dependency=afterok:7\nmodule load gcc\nbadcjobs merge x")}],
    "problem source": [{"change": ("manifest.csv", "gone.csv"), **NO}],
    "fine source": [{"change": ("manifest.csv", "$MANIFEST"), **NO}, {"change": ("badcjobs run m",
        "apptainer exec x.sif badcjobs run /m"), **NO}],
    "problem call": [{"change": ("run m", "runn m")}, {"change": ("--out", "--max-gpu 2 --out")}],
    "problem settings": [{"change": ("demo", "kazoo --hawkears-root hawkears"), "mended": {"PATH": "hawkears-bin"}},
                         {"change": ("--engine demo", "--engine demo --retries -1 --overlap 3"), **NO}],
    "problem config": [{"change": ("--engine", "--config odd.toml --engine"), **NO}],
    "problem partition": [{"change": (ARRAY, f"{ARRAY} --partition=gpus"), "PATH": NODES}],
    "problem constraint": [{"change": (ARRAY, f"{ARRAY} --constraint=gpu_mem_23"), "PATH": NODES}],
    "problem nodes": [{"change": (ARRAY, f"{ARRAY} --nodelist=zzz"), "PATH": NODES, **NO}],
    "problem sbatch": [{"PATH": f"strict {NODES}", **NO}],
    "fine Slurm": [{"PATH": f"dead {NODES}", **NO}],
    "warning merge account": [{"change": (SCRIPT, MERGE)}, {"account": "st-lab-1-gpu", "script": None, **NO}],
    "problem run.toml": [{"out": "used", "source": "other.csv", **NO}, {"out": "used", "change": (ARRAY,
        "--array=0-4")}, {"out": "spoiled", **NO},
                         {"out": "used", "script": None, "tasks": 5, "source": "manifest.csv", **NO}],
    "fine run.toml": [{"out": "used", "change": (ARRAY, "--array=1,3"), **NO}],
}  # fmt: skip


class LoginNode:
    """A folder with scripts, sources, site files, and programs for PATH."""

    def __init__(self, here: Path) -> None:
        self.here = here
        for name in ("home", "scratch", "plain", "empty", "bare", *PROGRAMS, "used", "spoiled"):
            (here / name).mkdir()
        for home in ("home", "."):
            (here / home / ".bash_profile").write_text(MODULES)
        rules = (folder("sites") / "sockeye.toml").read_text().replace("/scratch/<alloc>/<you>", f"{here}/scratch/july")
        lines = [f"r,c{n},a.wav,{n},{n + 600},0,," for n in range(40)]
        files = {
            "sockeye.toml": rules.replace('"/scratch"', f'"{here}"'), "plain.toml": 'name = "plain"\n',
                "odd.toml": "[run]\nx = 1\n",
            "manifest.csv": "\n".join(["recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes",
            *lines, ""]),
            "used/run.toml": f'written_by = "badcjobs 0"\n[run]\nsource = ["{here}/manifest.csv"]\n{FROZEN}',
            "spoiled/run.toml": "x = ", "other.csv": "",
        }  # fmt: skip
        for name, text in files.items():
            (here / name).write_text(text)
        for name, (program, text) in PROGRAMS.items():
            (here / name / program).write_text(text)
            (here / name / program).chmod(0o755)
        for name in ("bash", "cat", "date", "sh", "env", "python3"):
            (here / "plain" / name).symlink_to(shutil.which(name) or f"/bin/{name}")
        FakeNvidiaSmi(here / "smi")
        install_fake_hawkears(here / "hawkears-bin")
        make_fake_root(here / "hawkears")
        make_wav(here / "a.wav", 1, 1000)

    def check(self, case: dict[str, Any], script: str, name: str = "a.sbatch") -> Checked:
        """Check a script, or the line of submit, with the options and on the machine of a case."""
        environ = {"HOME": "home", "TMPDIR": "/tmp"} | {key: case[key] for key in ("HOME", "TMPDIR") if key in case}
        environ["HOME"] = str(self.here / environ["HOME"])
        path = case.get("PATH", "")
        environ["PATH"] = ":".join(str(self.here / one) for one in [*path.split(), "plain"] if path != "bare")
        submit = {
            key: case[key] for key in ("time", "account", "tasks", "mem", "gpus_per_task", "cluster") if key in case
        }
        is_script = "script" not in case
        if is_script:
            (self.here / name).write_text(script, newline="")
        source = (case["source"],) if "source" in case else ()
        out = Path(str(case["out"]).replace("HERE", str(self.here))) if "out" in case else None
        options = {"engine": "demo"} | ({} if is_script else case.get("options", {}))
        settings = RunSettings(source=source, out=out, **({} if is_script else options))  # type: ignore[arg-type]
        order = CheckOrder(
            settings, environ, SystemClock(), self.here, SubmitSettings(**submit), case.get("site", "sockeye.toml"),
            name if is_script else None, case.get("run_words", ()), case.get("quick", False), parse=PARSE,
        )  # fmt: skip
        return check(order)

    def plain(self, text: str) -> str:
        text = text.replace(str(self.here), "HERE")
        for found, instead in ((r"\d+\.\d s (apart|ahead)", r"SOME s \1"), (r"\((\w+), (local|shared)\)", r"(FS, \2)"),
                               (r"3,(59|60)\d\.\d s", "3,600 s"), (r"has left is [\d,]+",
                                   "has left is MANY")):  # fmt: skip
            text = re.sub(found, instead, text)
        return text


@pytest.fixture(scope="module")
def login_node(tmp_path_factory: pytest.TempPathFactory) -> LoginNode:
    return LoginNode(tmp_path_factory.mktemp("login"))


def said(checked: Checked, finding: str) -> list[Remark]:
    return [one for one in checked.findings if f"{one.severity} {one.subject}" == finding]


def paste(node: LoginNode, script: str, fix: str) -> tuple[str, dict[str, Any]]:
    """Do what a fix says: return the script, and what is added to the options."""
    line = fix.partition("   (")[0]
    if line.startswith("#SBATCH"):
        return script.replace("\nmodule", f"\n{line}\nmodule"), {}
    if line.startswith("--out"):
        return script, {"out": line.split()[1]}
    if line.startswith("mkdir -p "):
        Path(line.split()[-1]).mkdir()
    if line.startswith("sed "):
        subprocess.run(["bash", "-c", line], cwd=node.here, check=True)
        script = (node.here / "a.sbatch").read_bytes().decode()
    if line.startswith(("exec ", "module load", "unset ")):
        word = line.split()[0]
        kept = [one for one in script.splitlines() if word != "exec" or "badcjobs run" not in one]
        kept = [one for one in kept if word != "module" or not one.startswith("module")]
        last = [] if word == "exec" else [kept.pop()]
        script = "\n".join([*kept, line, *last, ""])
    return script, {}


def test_each_finding_comes_with_its_fix_and_goes_away_when_the_fix_is_pasted(
    login_node: LoginNode, pages: Pages
) -> None:
    assert [one for one in login_node.check({}, SCRIPT).findings if one.severity not in ("fine", "clock")] == []
    lines = []
    for finding, cases in CASES.items():
        for case in cases:
            old, new = case.get("change", ("#!", "#!"))
            script = SCRIPT.replace(old, new.replace("HERE", str(login_node.here)))
            found = login_node.check(case, script)
            shown = {key: value for key, value in case.items() if key not in ("change", "pasted", "mended")}
            lines.append(
                f"# {finding} {shown or ''} {f'{old!r} → {new!r}' if len(old) < 60 and 'change' in case else ''}"
            )
            assert said(found, finding), lines[-1]
            for one in said(found, finding):
                lines += [
                    f"  {one.text}",
                    *(f"  / {detail}" for detail in one.details),
                    *([f"    try: {one.fix}"] * bool(one.fix)),
                ]
            assert found.exit_code == any(one.severity == "problem" for one in found.findings)
            if case.get("pasted", True) or "mended" in case:
                mended, more = paste(login_node, script, said(found, finding)[0].fix or "")
                after = login_node.check({**case, **case.get("mended", {}), **more}, mended)
                assert not said(after, finding), lines[-1]
                lines.append("    which helps")
    pages({"findings.txt": login_node.plain("\n".join(lines))})


# case → options of check; without a script, the line of submit is checked
ORDERS: dict[str, dict[str, Any]] = {
    "the line of submit": {"source": "manifest.csv", "out": "results", "site": "sockeye.toml", "tasks": 200,
        "gpus_per_task": 4, "mem": "64G",
                           "time": "72:00:00", "script": None},
    "what submit asks for by itself": {"source": "manifest.csv", "quick": True, "site": "plain.toml", "script": None},
    "on this machine, without GPUs": {"source": "manifest.csv", "site": "plain.toml", "script": None,
        "cluster": "local", "gpus_per_task": 0,
                                      "options": {"cpu_workers": 2}, "PATH": "hasty"},
    "a run that has begun": {"source": "manifest.csv", "out": "used", "site": "plain.toml", "script": None,
        "tasks": 4},
    "nothing at all": {"site": None, "script": None, "HOME": "/nonexistent"},
    "a script with variables": {"source": "manifest.csv", "out": "results", "time": "30", "site": "plain.toml",
        "run_words": ("--engine=demo",),
                                "text": SCRIPT.replace(RUN[14:], 'run "$SOURCE" --out "$OUT" $BADCJOBS_ARGS')},
}  # fmt: skip


def test_all_that_is_found_is_shown_with_what_was_asked_for(login_node: LoginNode, pages: Pages) -> None:
    told = {}
    for name, case in ORDERS.items():
        found = login_node.check(case, case.get("text", SCRIPT))
        document = found.to_dict()
        ranks = [one["severity"] for one in document["findings"]]
        assert ranks == sorted(ranks, key=["problem", "warning", "fine"].index)
        assert (document["problems"], document["warnings"]) == (ranks.count("problem"), ranks.count("warning"))
        asked = {key: value for key, value in asdict(found.asked).items() if value not in (None, (), False)}
        lines = [f"{document['verdict']} on {document['site']}", f"asked: {asked}", f"source: {found.source}"]
        lines += [
            f"{one.severity} {one.subject}: {one.text} try: {one.fix}"
            for one in found.findings
            if one.subject != "GPUs"
        ]
        told[f"{name}.txt"] = login_node.plain("\n".join(lines))
    pages(told)


@pytest.mark.parametrize(
    ("case", "text", "words"),
    [
        ({"site": "atlantis"}, SCRIPT, "atlantis"),
        ({"script": None, "time": "noon"}, SCRIPT, "noon"),
        ({"run_words": ("--engine=demo",)}, SCRIPT, "a.sbatch does not use BADCJOBS_ARGS"),
        ({}, "#!/bin/sh\n\udce9", "cannot be read"),
    ],
)
def test_wrong_usage_is_refused(login_node: LoginNode, case: dict[str, Any], text: str, words: str) -> None:
    if text == SCRIPT:
        with pytest.raises(BadInput, match=words):
            login_node.check(case, text)
    else:
        (login_node.here / "b.sbatch").write_bytes(b"\xe9")
        with pytest.raises(BadInput, match=words):
            check(CheckOrder(RunSettings(), {}, SystemClock(), login_node.here, script="b.sbatch"))


# name → values of its keys, as its own comments give them
EXAMPLES = {
    **{name: ["account=st-pi-1-gpu", "setup=module load gcc cuda"] for name in ("array", "single", "multinode")},
    "apptainer-array": ["account=st-pi-1-gpu", "setup=module load gcc apptainer", "image=birds.sif"],
    "sockeye-array": ["account=st-pi-1-gpu"],
    "merge": ["account=st-pi-1"],
}


def test_every_template_filled_in_with_its_examples_has_nothing_to_fix(login_node: LoginNode) -> None:
    assert sorted(EXAMPLES) == [template.name for template in list_templates()]
    for name, values in EXAMPLES.items():
        given = [*values, "out=results", *([] if name == "merge" else ["source=manifest.csv", "args=--engine demo"])]
        script = fill_template(name, given, Project(), complete=True).text
        for case in ({}, {"site": "plain.toml"}, *([{"PATH": "hasty"}] if name == "merge" else [])):
            found = login_node.check(case, script, f"{name}.sbatch").findings
            assert [one for one in found if one.severity != "fine" and one.subject != "out"] == []
