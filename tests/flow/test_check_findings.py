"""Every finding of ``badcjobs check``, by the command line: it is there with its fix, and the fix makes it go away.

The site is Sockeye's own file with other folders in it; its programs (module, scontrol, nvidia-smi) are stand-ins.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rooms.cluster import list_templates
from rooms.root import folder
from support.badcjobs_program import Outcome, Site
from support.fake_hawkears import install_fake_hawkears, make_fake_root
from support.fake_nvidia_smi import FakeNvidiaSmi

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
CONFIG = "Configuration data as of {now}\nKillWait = {kill_wait} sec\nMaxArraySize = 1001\n"
SCONTROL = "#!/bin/sh\ncat <<EOF\n{}EOF\n"
SINFO = "#!/bin/sh\necho 'n1|gpu*|up|idle|infinite|0/64/0/64|gpu_mem_32,fast|gpu:v100:6|gpu:v100:0|180000|'\n"
SBATCH = "#!/bin/sh\n[ $1 = --test-only ] && echo 'allocation failure: Invalid account' >&2; exit 1\n"
MERGE = """#!/bin/bash
#SBATCH --account=st-lab-1-gpu
module load gcc
exec badcjobs merge results
"""


@dataclass(frozen=True)
class Case:
    """What is wrong, what is to be said about it, and what is done as it says."""

    finding: str  # severity and subject
    words: str  # in its text
    fix: str  # how its fix begins
    change: tuple[str, str] = ("", "")  # in the script, old and new
    args: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    mended: dict[str, str] | None = None  # the environment once the advice has been followed
    can_be_pasted: bool = True

    @property
    def key(self) -> tuple[str, str]:
        severity, _, subject = self.finding.partition(" ")
        return severity, subject


SLURM = "scontrol"  # a machine where it answers
NEVER = {"can_be_pasted": False}  # what it says is a question, or asks for something outside of the script
CASES = {
    "read-only output folder": Case("problem out", "cannot write", "--out {scratch}/july", args="--out {home}/results"),
    "output folder elsewhere": Case("problem out", "not below", "--out {scratch}/july", args="--out /var/tmp/x"),
    "output folder that nobody can write": Case(
        "problem out", "cannot be written here", "--out /a/folder", args="--out /proc/x", environ={"site": "plain"},
        **NEVER,
    ),
    "submit folder refused": Case(
        "problem submit folder", "refuses jobs from below", "cd {scratch}/july && sbatch", environ={"HOME": "{folder}"},
        mended={}, **NEVER,
    ),
    "log where nobody can write": Case(
        "problem log folder", "cannot write", "#SBATCH --output={scratch}",
        ("--open-mode", "--output={home}/%j.log --open-mode"),
    ),
    "log folder that is not there": Case(
        "problem log folder", "does not exist", "mkdir -p", ("--open-mode", "--output=logs/%j.log --open-mode")
    ),
    "array larger than the site allows": Case(
        "problem array", "10,001 tasks", "#SBATCH --array=0-9999", ("--array=0-3", "--array=0-10000")
    ),
    "array larger than this Slurm allows": Case(
        "problem array", "1,002 tasks", "#SBATCH --array=0-1000", ("--array=0-3", "--array=0-1001"),
        environ={"PATH": SLURM},
    ),
    "GPU-hours over the cap": Case(
        "problem GPU-hours", "= 4,800 GPU-hours", "#SBATCH --time=6:00:00", ("--array=0-3", "--array=0-99")
    ),
    "GPU-hours of a job without an array": Case(
        "problem GPU-hours", "1 task × 16 GPUs × 168 h = 2,688", "#SBATCH --time=150:00:00",
        ("--array=0-3\n", "--nodes=4\n"), args="--time 168:00:00", **NEVER,
    ),
    "file quota": Case(
        "problem files", "= 20,000,010 files", "#SBATCH --array=0-999998", ("--array=0-3", "--array=0-1999999")
    ),
    "memory dearer than the GPUs": Case("warning billing", "64 GB × 5 = 320", "#SBATCH --mem=16G", ("16G", "64G")),
    "cores dearer than the GPUs": Case(
        "warning billing", "cores cost 4.0 times", "#SBATCH --cpus-per-task=20", ("16G", "4G --gpus-per-node=1")
    ),
    "more GPUs than a node has": Case(
        "problem GPUs", "8 GPUs on a node", "#SBATCH --gpus-per-node=4", ("node=4", "node=8")
    ),
    "more memory than a node has": Case("problem memory", "256 GB", "#SBATCH --mem=180G", ("16G", "256G")),
    "several nodes, one at work": Case(
        "warning nodes", "asks for 2 nodes", "#SBATCH --nodes=1", ("--array=0-3", "--array=0-3 --nodes=2")
    ),
    "no GPU": Case("warning GPUs", "no GPU", "#SBATCH --gpus-per-node=1", ("#SBATCH --gpus-per-node=4\n", "")),
    "no time limit": Case("problem time", "no time limit", "#SBATCH --time=168:00:00", ("12:00:00", "unlimited")),
    "time over the longest": Case("problem time", "200 h", "#SBATCH --time=168:00:00", ("12:00:00", "200:00:00")),
    "missing module": Case(
        "problem modules", "Lmod error: unknown: birds", "module avail birds", ("cuda", "cuda birds"), **NEVER
    ),
    "module that the site wants": Case(
        "warning modules", "does not load gcc", "module load gcc cuda", ("gcc cuda", "cuda")
    ),
    "missing HawkEars": Case(
        "problem engine", "hawkears", "", ("--engine demo", "--hawkears-root hawkears"),
        mended={"PATH": "hawkears"}, **NEVER,
    ),
    "missing checkpoints": Case(
        "problem engine", "no models", "", ("--engine demo", "--hawkears-root empty"),
        environ={"PATH": "hawkears"}, **NEVER,
    ),
    "filesystem that is not safe for WAL": Case(
        "warning live files", "WAL is not safe", "unset TMPDIR", environ={"TMPDIR": "/sys", "site": "plain"}
    ),
    "no NVML": Case("warning GPUs", "NVML cannot be loaded", "python -c", environ={"PATH": "smi"}, **NEVER),
    "clock skew": Case(
        "problem clock", "s behind", "timedatectl", environ={"PATH": "late"}, mended={"PATH": SLURM}, **NEVER
    ),
    "too little time to end": Case(
        "warning grace", "10 s after TERM", "badcjobs run … --config run.grace_s=5", environ={"PATH": "hasty"}, **NEVER
    ),
    "no early warning": Case(
        "warning signal", "no early warning", "#SBATCH --signal=B:USR1@180", ("#SBATCH --signal=B:USR1@180\n", "")
    ),
    "warning before the beginning": Case(
        "problem signal", "warns at once", "#SBATCH --signal=B:USR1@180", ("@180", "@43200")
    ),
    "no exec": Case("problem start", "does not start badcjobs with exec", "exec badcjobs run", ("exec ", "")),
    "exec in a pipeline": Case(
        "problem start", "in a pipeline", "exec badcjobs run", ("--engine demo", "--engine demo | tee log")
    ),
    "log overwritten": Case(
        "warning log", "overwrites", "#SBATCH --open-mode=append", ("#SBATCH --open-mode=append\n", "")
    ),
    "account": Case(
        "problem account", "does not end in -gpu", "#SBATCH --account=st-lab-1-gpu", ("-1-gpu", "-1")
    ),
    "option too late": Case(
        "problem script", "line 11: sbatch ignores #SBATCH", "sed -i -e '11d' -e '1a #SBATCH --qos=x' ",
        ("exec", "#SBATCH --qos=x\nexec"),
    ),
    "lines that end as on Windows": Case("problem script", "Windows line ends", r"sed -i 's/\r$//' a", ("\n", "\r\n")),
    "no interpreter": Case("problem script", "#!", "sed -i '1i #!/bin/bash' a", ("#!/bin/bash\n", "")),
    "option that sbatch does not know": Case(
        "problem script", "line 6: sbatch has no option --birds", "#SBATCH --mem=16G", ("=16G", "=16G --birds"),
        **NEVER,  # it takes the place of line 6
    ),
    "option that is a comment": Case(
        "warning script", "line 6: sbatch reads this as a comment", "#SBATCH --nice",
        ("#SBATCH --mem", "# SBATCH --nice\n#SBATCH --mem"), **NEVER,
    ),
    "afterok": Case(
        "warning dependency", "never starts", "#SBATCH --dependency=afterany:7 ",
        (f"module load gcc cuda\n{RUN}", "#SBATCH --dependency=afterok:7\nmodule load gcc\nbadcjobs merge x"),
    ),
    "array that hides its spacing": Case(
        "problem array", "--array=1,3,5,7 is a list", "#SBATCH --array=1-7:2", ("--array=0-3", "--array=1,3,5,7")
    ),
    "source that is not there": Case(
        "problem source", "gone.csv does not exist", "ls -l", ("manifest.csv", "gone.csv"), **NEVER
    ),
    "command that badcjobs does not have": Case(
        "problem call", "line 11: badcjobs has no command runn", "exec badcjobs run manifest.csv", ("run m", "runn m")
    ),
    "option that badcjobs does not have": Case(
        "problem call", "No such option: --max-gpu", "exec badcjobs run manifest.csv", ("--out", "--max-gpu 2 --out")
    ),
    "engine that there is not": Case(
        "problem settings", '--engine = "kazoo" must be one of', f"{RUN[:-4]}hawkears --hawkears-root hawkears",
        ("demo", "kazoo --hawkears-root hawkears"), mended={"PATH": "hawkears"},
    ),
    "more GPUs than a node of this Slurm has": Case(
        "problem GPUs", "but a node of this Slurm has 6", "#SBATCH --gpus-per-node=6", ("node=4", "node=9"),
        environ={"PATH": SLURM, "site": "plain"},
    ),
    "partition that there is not": Case(
        "problem partition", "no partition gpus (there: gpu)", "#SBATCH --partition=gpu",
        ("--array=0-3", "--array=0-3 --partition=gpus"), environ={"PATH": SLURM},
    ),
    "feature that no node has": Case(
        "problem constraint", "has the feature gpu_mem_23 (there: fast, gpu_mem_32)",
        "#SBATCH --constraint=gpu_mem_32", ("--array=0-3", "--array=0-3 --constraint=gpu_mem_23"),
        environ={"PATH": SLURM},
    ),
    "kind of GPU that there is not": Case(
        "problem GPUs", "a GPU of kind a100 (there: v100)", "#SBATCH --gpus-per-node=4 ", ("node=4", "node=a100:4"),
        environ={"PATH": SLURM},
    ),
    "node that there is not": Case(
        "problem nodes", "no node zzz (there: n1)", "sinfo -N ", ("--array=0-3", "--array=0-3 --nodelist=zzz"),
        environ={"PATH": SLURM}, **NEVER,
    ),
    "script that sbatch refuses": Case(
        "problem sbatch", "Invalid account", "sbatch --test-only a", environ={"PATH": "strict"}, **NEVER
    ),
    "program that keeps signals": Case(
        "problem start", "behind timeout, which is killed by USR1", "exec badcjobs run",
        ("exec badcjobs", "exec timeout -k 5 100 badcjobs"),
    ),
    "merge paid by the account of GPU jobs": Case(
        "warning merge account", "the merge job has no GPU, but", "#SBATCH --account=st-lab-1", (SCRIPT, MERGE)
    ),
    "merge of submit paid by the account of GPU jobs": Case(
        "warning merge account", "the merge job has no GPU, but", "--config submit.merge_account=st-lab-1",
        args="--account st-lab-1-gpu", environ={"script": "no"}, **NEVER,
    ),
}  # fmt: skip


class Machine:
    """A login node with Sockeye's rules."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.names = {
            "folder": str(site.folder),
            "home": str(site.folder / "home"),
            "scratch": str(site.folder / "scratch"),
        }
        for name in ("home", "scratch", "plain", SLURM, "late", "hasty", "strict", "hawkears-bin", "empty"):
            (site.folder / name).mkdir()
        for home in (site.folder / "home", site.folder):
            (home / ".bash_profile").write_text(MODULES)
        rules = (folder("sites") / "sockeye.toml").read_text().replace("/scratch/<alloc>/<you>", "{scratch}/july")
        rules = rules.replace('"/scratch"', '"{folder}"')
        (site.folder / "sockeye.toml").write_text(rules.format(**self.names))
        (site.folder / "plain.toml").write_text('name = "plain"\n')
        self._install_programs()
        make_fake_root(site.folder / "hawkears")
        site.manifest(40)

    def _install_programs(self) -> None:
        here = self.site.folder
        smi = FakeNvidiaSmi(here / "smi")
        install_fake_hawkears(here / "hawkears-bin")
        self.paths = {name: f"{name}:plain" for name in (SLURM, "late", "hasty")} | {"strict": f"strict:{SLURM}:plain"}
        self.paths |= {"plain": "plain", "smi": f"{smi.folder}:plain", "hawkears": "hawkears-bin:plain"}
        for name in ("bash", "cat", "date", "sh", "env", "python3"):
            if found := shutil.which(name):
                (here / "plain" / name).symlink_to(found)
        right, wrong = "$(date +%s)", "$(( $(date +%s) - 3600 ))"
        for name, now, kill_wait in ((SLURM, right, 30), ("hasty", right, 10), ("late", wrong, 30)):
            (here / name / "scontrol").write_text(SCONTROL.format(CONFIG.format(now=now, kill_wait=kill_wait)))
            (here / name / "scontrol").chmod(0o755)
        for path, text in ((here / SLURM / "sinfo", SINFO), (here / "strict" / "sbatch", SBATCH)):
            path.write_text(text)
            path.chmod(0o755)

    def command(self, name: str, script: str, args: str, environ: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """Write a script and return how it is checked, and where."""
        (self.site.folder / name).write_text(script)
        known = {"HOME": "{home}", "site": "sockeye", "PATH": "plain", **environ}
        known = {key: value.format(**self.names) for key, value in known.items()}
        path = [str(self.site.folder / one) for one in self.paths[known["PATH"]].split(":")]
        rules = known.pop("site")
        what, of_run = (name, "") if known.pop("script", "") != "no" else ("", "-- --engine demo")
        options = f"check {what} --site {rules}.toml {args} --json {of_run}".format(**self.names)
        return options.split(), {**known, "PATH": ":".join(path)}

    def check_each(self, commands: list[tuple[list[str], dict[str, str]]]) -> list[Outcome]:
        return self.site.badcjobs_each([one for one, _ in commands], [env for _, env in commands])


def pasted(script: str, fix: str) -> tuple[str, str]:
    """Do what a fix says: return the script, and what is added to the command line."""
    line = fix.partition("   (")[0]
    if line.startswith("#SBATCH"):
        return script.replace("\nmodule", f"\n{line}\nmodule"), ""
    if line.startswith("--out"):
        return script, line
    if line.startswith(("exec ", "module load", "unset ")):
        word = line.split()[0]
        kept = [one for one in script.splitlines() if word != "exec" or "badcjobs run" not in one]
        kept = [one for one in kept if word != "module" or not one.startswith("module")]
        last = [] if word == "exec" else [kept.pop()]
        return "\n".join([*kept, line, *last, ""]), ""
    return script, ""


@dataclass(frozen=True)
class Answer:
    """What was found, and what was found once the fix was pasted."""

    finding: dict[str, Any] | None
    exit_code: int
    after: dict[tuple[str, str], dict[str, Any]] | None


def by_subject(outcome: Outcome) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["severity"], one["subject"]): one for one in outcome.json["findings"]}


@pytest.fixture(scope="module")
def machine(shared_site: Site) -> Machine:
    return Machine(shared_site)


@pytest.fixture(scope="module")
def answers(machine: Machine) -> dict[str, Answer]:
    """Ask about everything at once, then do as was said and ask again."""
    scripts = {name: SCRIPT.replace(*case.change) if case.change[0] else SCRIPT for name, case in CASES.items()}
    scripts = {name: text.replace("{home}", machine.names["home"]) for name, text in scripts.items()}
    numbered = enumerate(CASES.items())
    asked = [
        machine.command(f"a{number}.sbatch", scripts[name], case.args, case.environ)
        for number, (name, case) in numbered
    ]
    first = dict(zip(CASES, machine.check_each(asked), strict=True))
    found = {name: by_subject(one).get(CASES[name].key) for name, one in first.items()}
    again = {}
    for number, (name, case) in enumerate(CASES.items()):
        fix = (found[name] or {}).get("fix") or ""
        script, more = pasted(scripts[name], fix)
        if fix.startswith("mkdir -p "):
            Path(fix.split()[-1]).mkdir()
        if fix.startswith("sed "):
            here = machine.site.folder
            subprocess.run(["bash", "-c", fix.partition("   (")[0]], cwd=here, check=True)
            script = (here / f"a{number}.sbatch").read_bytes().decode()
        if case.can_be_pasted or case.mended is not None:
            environ = case.environ if case.mended is None else case.mended
            again[name] = machine.command(f"b{number}.sbatch", script, more or case.args, environ)
    second = dict(zip(again, machine.check_each(list(again.values())), strict=True))
    return {
        name: Answer(found[name], outcome.exit_code, by_subject(second[name]) if name in second else None)
        for name, outcome in first.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_each_finding_comes_with_its_fix_and_goes_away_when_the_fix_is_pasted(
    answers: dict[str, Answer], machine: Machine, name: str
) -> None:
    case, answer = CASES[name], answers[name]
    assert answer.finding is not None
    assert case.words in answer.finding["text"]
    assert answer.finding["fix"].startswith(case.fix.format(**machine.names))
    assert answer.exit_code == (1 if case.finding.startswith("problem") else 0)
    assert answer.after is None or case.key not in answer.after


# name → values of its keys, as its own comments give them
EXAMPLES = {
    "array": ["account=st-pi-1-gpu", "setup=module load gcc cuda"],
    "single": ["account=st-pi-1-gpu", "setup=module load gcc cuda"],
    "multinode": ["account=st-pi-1-gpu", "setup=module load gcc cuda"],
    "apptainer-array": ["account=st-pi-1-gpu", "setup=module load gcc apptainer", "image=birds.sif"],
    "sockeye-array": ["account=st-pi-1-gpu"],
    "merge": ["account=st-pi-1"],
}


def test_every_template_filled_in_with_its_examples_has_nothing_to_mend_on_sockeye(machine: Machine) -> None:
    assert sorted(EXAMPLES) == [template.name for template in list_templates()]
    fills = []
    for name, values in EXAMPLES.items():
        given = [*values, "out=results", *([] if name == "merge" else ["source=manifest.csv", "args=--engine demo"])]
        fills.append(["template", name, "-o", f"{name}.sbatch", *(word for one in given for word in ("--set", one))])
    assert [done.exit_code for done in machine.site.badcjobs_each(fills)] == [0] * len(EXAMPLES)
    scripts = {name: (machine.site.folder / f"{name}.sbatch").read_text() for name in EXAMPLES}
    places = ({"site": "sockeye"}, {"site": "plain"})
    commands = [
        machine.command(f"{name}.sbatch", text, "", place) for name, text in scripts.items() for place in places
    ]
    commands.append(machine.command("merge.sbatch", scripts["merge"], "", {"PATH": "hasty"}))  # it has no chunk to end
    for outcome in machine.check_each(commands):
        left = [one for one in outcome.json["findings"] if one["severity"] != "fine" and one["subject"] != "out"]
        assert left == []
