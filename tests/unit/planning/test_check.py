"""``badcjobs check`` on a login node with Sockeye's rules: each finding comes with a fix, and pasted, the fix helps.

The site is Sockeye's own file with other folders in it; its programs (module, scontrol, nvidia-smi) are stand-ins. What
is checked stands in tests/data/check_cases.txt and check_orders.txt.
"""

import re
import shlex
import shutil
import struct
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import typer
from rooms import planning
from rooms.cli import app, make_parser
from rooms.cluster import Asked, BatchScript, Call, Mistake, fill_template, list_templates, parse_signal
from rooms.planning import CheckOrder, Site, check
from rooms.root import BadInput, Project, RunSettings, SubmitSettings, SystemClock, folder
from support.brief import literal, without_hints
from support.cases import read_blocks, read_data, read_parts
from support.fake_hawkears import install_fake_hawkears, make_fake_root
from support.fake_nvidia_smi import FakeNvidiaSmi
from support.source_files import read_cases, write_files

PARSE = make_parser(typer.main.get_command(app))
USUAL_ORDER = {
    "site": None, "quick": False, "progress": lambda rows: None, "parse": PARSE, "prefer": "cheapest", "trust": None,
    "site_trust": None,
}  # fmt: skip
SCRIPT = read_data("usual_job.sbatch")
MERGE = "#!/bin/bash\n#SBATCH --account=st-lab-1-gpu\nmodule load gcc\nexec badcjobs merge results\n"


def read_cases_of_check(name, here):
    """Yield each line of the data with the heading above it, the script that it means, and the options of check."""
    for block in read_blocks(name):
        heading, *lines = block.strip().splitlines()
        for line in lines:
            text, script = line.removeprefix("helps: ").replace("HERE", str(here)), SCRIPT
            words = [word.encode().decode("unicode_escape") if "\\" in word else word for word in shlex.split(text)]
            if "→" in words:
                place = words.index("→")
                script = SCRIPT.replace(words[place - 1], words[place + 1])
                del words[place - 1 : place + 2]
            options = dict(word.partition("=")[::2] for word in words)
            yield heading, line, MERGE if "merge.sbatch" in options else script, options


class LoginNode:
    """A folder with scripts, sources, site files, and programs for PATH."""

    def __init__(self, here):
        self.here = here
        (case,) = read_cases("login_node")
        write_files(case.files.replace("HERE", str(here)), here)
        shutil.copy(here / "home" / ".bash_profile", here)
        for name in ("scratch", "plain", "empty"):
            (here / name).mkdir()
        rules = (folder("sites") / "sockeye.toml").read_text().replace("/scratch/<alloc>/<you>", f"{here}/scratch/july")
        (here / "sockeye.toml").write_text(rules.replace('"/scratch"', f'"{here}"'))
        for name in ("bash", "cat", "date", "sh", "env", "python3"):
            (here / "plain" / name).symlink_to(shutil.which(name) or f"/bin/{name}")
        FakeNvidiaSmi(here / "smi")
        install_fake_hawkears(here / "hawkears-bin")
        make_fake_root(here / "hawkears")

    def check(self, options, script, name="a.sbatch"):
        """Check a script, or what submit would make, with these options and on this machine."""
        path, home = options.get("PATH", ""), options.get("HOME", "home")
        path = ":".join(f"{self.here}/{one}" for one in [*path.split(), "plain"] if path != "bare")
        environ = {"HOME": f"{self.here}/{home}", "TMPDIR": options.get("TMPDIR", "/tmp"), "PATH": path}
        environ["XDG_CACHE_HOME"] = options.get("XDG_CACHE_HOME", f"{self.here}/cache")
        submit = {key: options[key] for key in ("time", "account", "mem", "cluster") if key in options}
        submit |= {key: int(options[key]) for key in ("tasks", "gpus_per_task") if key in options}
        more = {"engine": "demo", "cpu_workers": int(options.get("cpu_workers", 0))} if "submit" in options else {}
        out = Path(options["out"]) if "out" in options else None
        settings = RunSettings(source=tuple(options.get("source", "").split()), out=out, **more)  # type: ignore[arg-type]
        (self.here / name).write_bytes(script.encode("latin-1" if "\xe9" in script else "utf-8"))
        order = CheckOrder(settings, environ, SystemClock(), self.here, **USUAL_ORDER)
        return check(order._replace(
            submit=SubmitSettings(**submit), site=options.get("site", "sockeye.toml") or None,
            script=None if "submit" in options else name, run_words=tuple(options.get("run_words", "").split()),
            quick="quick" in options,
        ))  # fmt: skip

    def plain(self, text):
        text = text.replace(str(self.here), "HERE")
        for found, instead in (
            (r"\d+\.\d s (apart|ahead)", r"SOME s \1"), (r"\((\w+), (local|shared)\)", r"(FS, \2)"),
            (r"3,(59|60)\d\.\d s", "3,600 s"), (r"has left is [\d,]+", "has left is MANY"),
        ):  # fmt: skip
            text = re.sub(found, instead, text)
        return text


@pytest.fixture(scope="module")
def login_node(tmp_path_factory):
    return LoginNode(tmp_path_factory.mktemp("login"))


def said(checked, finding):
    return [one for one in checked.findings if f"{one.severity} {one.subject}" == finding]


def shown(one):
    text = f"  {one.severity} {one.subject}: {' / '.join([one.text, *one.details])}"
    return [text, f"    try: {one.fix}"] if one.fix else [text]


def paste(node, script, fix):
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
    if line.startswith(("exec ", "module load", "unset ", "export ")):
        word = line.split()[0]
        kept = [one for one in script.splitlines() if word != "exec" or "badcjobs run" not in one]
        kept = [one for one in kept if word != "module" or not one.startswith("module")]
        last = [] if word == "exec" else [kept.pop()]
        script = "\n".join([*kept, line, *last, ""])
    return script, {}


def test_each_finding_has_a_fix_and_goes_away_when_the_fix_is_pasted(login_node, pages):
    assert {one.severity for one in login_node.check({}, SCRIPT).findings} == {"fine"}
    lines = []
    for finding, line, script, options in read_cases_of_check("check_cases.txt", login_node.here):
        checked = login_node.check(options, script)
        found = said(checked, finding)
        lines.append(f"# {finding} | {line}")
        assert found, lines[-1]
        for one in found:
            lines += [f"  {one.text}", *(f"  / {detail}" for detail in one.details)]
            lines += [f"    try: {one.fix}"] if one.fix else []
        assert checked.exit_code == any(one.severity == "problem" for one in checked.findings)
        if line.startswith("helps: "):
            script, more = paste(login_node, script, found[0].fix or "")
            more |= {key.removeprefix("mended."): value for key, value in options.items() if key.startswith("mended.")}
            assert not said(login_node.check({**options, **more}, script), finding), lines[-1]
    pages({"findings.txt": login_node.plain("\n".join(lines))})


def test_all_that_is_found_is_shown_with_what_was_asked_for(login_node, pages):
    lines = []
    for heading, line, script, options in read_cases_of_check("check_orders.txt", login_node.here):
        lines.append(f"\n## {heading}\n$ {line}")
        try:
            found = login_node.check(options, script)
        except BadInput as error:
            lines.append(f"refused: {error.what}\n{error.why}\ntry: {error.fix}")
            continue
        document = found.to_dict()
        ranks = [one["severity"] for one in document["findings"]]
        assert ranks == sorted(ranks, key=["problem", "warning", "fine"].index)
        asked = {key: value for key, value in asdict(found.asked).items() if value not in (None, (), False)}
        assert (document["problems"], document["warnings"]) == (ranks.count("problem"), ranks.count("warning"))
        lines.append(f"{document['verdict']} on {document['site']}")
        lines += [f"asked: {asked}", f"source: {found.source}"]
        reported = [one for one in found.findings if one.subject != "GPUs"]
        lines += [f"{one.severity} {one.subject}: {one.text} try: {one.fix}" for one in reported]
    pages({"orders.txt": login_node.plain("\n".join(lines))})


def test_memory_that_cannot_hold_the_longest_recording_is_found(tmp_path):
    with (tmp_path / "long.wav").open("wb") as file:
        size = 7200 * 8000
        file.write(
            struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", 36 + size, b"WAVEfmt ", 16, 1, 1, 8000, 8000, 1, 8, b"data", size)
        )
        file.truncate(44 + size)  # takes no space
    settings = RunSettings(source=("long.wav",), out=Path("out"))

    def said_about_memory(settings=settings, **submit):
        order = CheckOrder(settings, {"HOME": str(tmp_path)}, SystemClock(), tmp_path, **USUAL_ORDER)
        order = order._replace(submit=SubmitSettings(**submit))
        return [(one.severity, one.text, one.fix[:8]) for one in check(order).findings if one.subject == "memory"]

    text = "7 GB may not hold 1 worker, which may need 9"
    assert said_about_memory(mem="7G") == [("warning", text, "--mem 9G")]
    assert said_about_memory(mem="9G") == said_about_memory(replace(settings, chunk_length_s=294.0)) == []
    assert said_about_memory(replace(settings, engine="demo")) == []
    many = replace(settings, chunk_length_s=294.0, workers_per_gpu="40")
    order = CheckOrder(many, {}, SystemClock(), tmp_path, **USUAL_ORDER)
    found = check(order._replace(submit=SubmitSettings(cpus=2, mem="4G"))).findings
    assert [
        (one.severity, one.text, one.fix.split("   ")[0]) for one in found if one.subject in ("memory", "cores")
    ] == [
        ("warning", "4 GB may not hold 40 workers, which may need 88", "--mem 88G"),
        ("warning", "2 cores for 40 workers: each keeps one busy", "--cpus 40"),
    ]


def test_the_advice_about_cost_leaves_the_workers_that_the_request_means_their_memory_and_cores(tmp_path):
    (tmp_path / "cores.toml").write_text('name = "x"\n[billing]\ncpu = 3\ngpu = 1\n')

    def advice(site, cpus, mem="9G", **settings):
        given = RunSettings(out=Path("out"), **settings)
        submit = SubmitSettings(gpus_per_task=4, cpus=cpus, mem=mem)
        order = CheckOrder(given, {}, SystemClock(), tmp_path, **USUAL_ORDER)
        found = check(order._replace(submit=submit, site=site)).findings
        return [one.fix and one.fix.split("   ")[0] for one in found if one.subject in ("billing", "cores")]

    cut = {"chunk_length_s": 294.0}
    assert advice("sockeye", 24, "53G", **cut) == [None], "as in the README: one worker per core"
    assert advice("sockeye", 8, "53G", **cut) == ["--mem 18G"]
    assert advice("sockeye", 24, "53G", **cut, workers_per_gpu="2") == ["--mem 18G"]
    assert advice("sockeye", 24, "0", **cut) == ["--mem 53G"]
    for engine in ("hawkears", "demo"):
        workers = {"engine": engine, "workers_per_gpu": "3"}
        assert advice("cores.toml", 14, **workers) == ["--cpus 12"]
        assert advice("cores.toml", 12, **workers) == [None]


# template → values of its keys, as its own comments give them
EXAMPLES = dict(line.split(": ", 1) for line in read_data("template_examples.txt").splitlines())


def test_every_template_filled_in_with_its_examples_has_nothing_to_fix(login_node):
    assert sorted(EXAMPLES) == [template.name for template in list_templates()]
    for name, values in EXAMPLES.items():
        script = fill_template(name, values.split(" | "), Project(), complete=True).text
        for options in ({}, {"site": "plain.toml"}, *([{"PATH": "hasty"}] if name == "merge" else [])):
            found = login_node.check(options, script, f"{name}.sbatch").findings
            assert [one for one in found if one.severity != "fine" and one.subject != "out"] == []


UNCHECKED = ("start", "source")  # of what is fine, what was not checked is said


def test_nothing_that_check_says_about_a_script_is_false(tmp_path, pages):
    (case,) = read_cases("sockeye")
    write_files(case.files.replace("HERE", str(tmp_path)), tmp_path)
    work, said = tmp_path / "scratch" / "jobs", []
    rules = (folder("sites") / "sockeye.toml").read_text().replace("/scratch", f"{tmp_path}/scratch")
    (tmp_path / "site.toml").write_text(rules)
    shared, *scripts = read_data("job_scripts.txt").split("\n=== ")
    meanings = {"@CR": "\r", "{scratch}": f"{tmp_path}/scratch", **dict(re.findall(r"^(@\w+): (.*)", shared, re.M))}
    cases = [(name, f"{text.rstrip()}\n", {}, {}) for name, text in (one.split("\n", 1) for one in scripts)]
    plain = "@HEAD\n@LOAD\nexec @RUN\n"
    cases.append(("with another account in the environment", plain, {"SBATCH_ACCOUNT": "st-lab-1"}, {}))
    cases.append(("with more GPUs on the command line", plain, {}, {"gpus_per_task": 8, "cpus": 6}))
    for name, text, environ, submit in cases:
        for word, meant in meanings.items():
            text = text.replace(word, meant.replace("⏎", "\n"))
        (work / "job.sbatch").write_text(text, newline="")
        places = {"HOME": f"{tmp_path}/home", "XDG_CACHE_HOME": f"{tmp_path}/scratch/cache"}
        here = {**places, "PATH": f"{tmp_path}/bin", **environ}
        order = CheckOrder(RunSettings(), here, SystemClock(), work, **USUAL_ORDER)
        submitted, rules = SubmitSettings(**submit), f"{tmp_path}/site.toml"
        checked = check(order._replace(submit=submitted, site=rules, script="job.sbatch"))
        said.append(f"{name} → exit code {checked.exit_code}")
        for one in checked.findings:
            if one.severity != "fine" or (one.subject in UNCHECKED and one.text.startswith("not checked")):
                said += shown(one)
    pages({"findings.txt": without_hints("\n".join(said)).replace(str(tmp_path), "ROOT")})


SITES = {
    "sockeye": planning.find_site("sockeye", Path()),
    "mine": Site("mine"),
    "sum": Site("sum", bill_cpu=1, bill_memory_gb=1, bill_gpu=10, node_memory_gb=100),
}
SCRATCH = planning.FolderFacts(
    "/scratch/lab/july", "/scratch/lab/july", "lustre, shared", shared=True, refusal=None, missing=False,
    free_bytes=None, free_files=None, skew_s=None,
)  # fmt: skip
START = Call(9, "badcjobs run m.csv --out o", before=("exec",))
BATCH = BatchScript(
    "job.sbatch", {"open-mode": "append"}, signal=parse_signal("B:USR1@180"), call=START, modules=("gcc", "cuda")
)
USUAL = {  # where only a part of a fact is given
    "script": BATCH, "slurm": planning.SlurmFacts(),
    "merge": replace(BATCH, call=replace(START, command="merge")),
    "gpus": planning.GpuFacts((), "nvml", "it says why", in_job=False),
    "source": planning.SourceFacts(0, None, has_places=False, document={}),
    "modules": planning.ModuleFacts(("gcc", "cuda")), "site": Site(""),
}  # fmt: skip
WRONG = (Mistake("line 3: sbatch has no option --x", "#SBATCH --y"),)
TOPICS, SBATCH = (  # of a topic: its subjects, then a line of facts each
    read_parts(f"{name}.txt") for name in ("check_facts", "sbatch_test_only")
)


def parse_call(text):
    """Return a call of badcjobs: the words before it, ``-`` for none, and its other fields behind semicolons."""
    before, *more = text.split("; ")
    values = {name: literal(value) for name, _, value in (one.partition("=") for one in more)}
    return replace(START, before=tuple(before.strip("-").split()), **values)


def parse(name, text):
    if name == "script.signal":
        return parse_signal(text) if text else None
    if name == "script.call":
        return parse_call(text) if text else None
    if name == "trial":
        return planning.parse_trial(int(text != "taken"), SBATCH[text]) if text in SBATCH else literal(text)
    if name in ("out", "submit_folder", "temporary"):
        return SCRATCH._replace(path=text, real=text)
    if name == "log_folders":
        return tuple(SCRATCH._replace(path=path, real=path, missing="gone" in path) for path in text.split(", "))
    return WRONG if text == "WRONG" else literal(text)


def facts_of(line):
    """Build facts from words: ``tasks=9`` is asked for, ``out=/x out.missing=True`` is what is known about a folder."""
    facts = {"home": "/home/ada"}
    asked = {}
    for name, _, text in (word.partition("=") for word in shlex.split(line)):
        value = parse(name, text)
        part, _, key = name.partition(".")
        if name in SITES:
            facts["site"] = SITES[name]
        elif name in USUAL:
            facts["script" if name == "merge" else name] = USUAL[name]
        elif key:
            fact = facts.get(part) or USUAL[part]
            facts[part] = fact._replace(**{key: value}) if isinstance(fact, tuple) else replace(fact, **{key: value})
        elif name in Asked.__dataclass_fields__:
            asked[name] = value
        else:
            facts[name] = value

    run = {name: facts.pop(name) for name in ("live_mode", "cpu_workers") if name in facts}
    site = facts.pop("site", Site(""))
    return planning.Job(Asked(**asked), site, RunSettings(**run), **facts)


@pytest.mark.parametrize("topic", TOPICS)
def test_every_rule_fires_where_it_should_and_nowhere_else(topic, pages):
    subjects, *cases = TOPICS[topic].splitlines()
    lines = []
    for case in filter(None, cases):
        lines.append(f"# {case}")
        for one in planning.check_facts(facts_of(case)):
            assert one.severity == "fine" or one.fix
            assert "\n" not in one.text + (one.fix or "")
            lines += shown(one) if one.subject in subjects.split(", ") else []
    pages({"rules.txt": "\n".join(lines)})


def test_the_worst_comes_first_only_lines_to_paste_are_long_and_a_name_cannot_steer_the_terminal(pages):
    long = planning.problem("out", "word " * 60, "--out " + "x" * 150, ("line 1: first", "line 2: second"))
    good, other = planning.fine("array", "100 tasks"), planning.warning("submit folder", "a\x1b[31mb", "cd a\x1b")
    found = [good, other, long, planning.fine("x", "")]
    pages({"all.txt": planning.remarks_text(found), "none.txt": planning.remarks_text([good])})


FILES = read_blocks("sites.txt")


def test_sockeyes_limits_come_with_badcjobs_and_only_the_name_of_a_site_is_needed(tmp_path, pages):
    site = planning.find_site("sockeye", tmp_path)
    pages({"sockeye.txt": "\n".join(f"{name} = {value}" for name, value in asdict(site).items())})
    assert site.cores_per_gpu == 6 and site.billing.per_hour(4, 16, 24) == 80
    (tmp_path / "mine.toml").write_text('name = "mine"\nabout = "x"\n[limits]\narray_tasks = 500\ngpu_hours = 3\n')
    mine = planning.find_site("./mine.toml", tmp_path)
    assert mine == Site("mine", array_tasks=500, gpu_hours=3)
    assert mine.cores_per_gpu is mine.billing is mine.time_h is mine.plan_time_h is None
    (tmp_path / "free.toml").write_text('name = "free"\n[billing]\ngpu = 0\nmemory_gb = 2\n')
    assert planning.find_site("free.toml", tmp_path).billing.per_hour(4, 16, 24) == 32, "GPUs and cores cost nothing"


@pytest.mark.parametrize("hours", ["0", "0.01", "-1", "nan", "inf", "true"])
def test_a_time_limit_of_a_site_is_at_least_a_minute(tmp_path, hours):
    for table, key in (("plan", "time_h"), ("limits", "time_h")):
        (tmp_path / "x.toml").write_text(f'name = "x"\n[{table}]\n{key} = {hours}\n')
        with pytest.raises(BadInput, match="1 mistake") as refused:
            planning.find_site("x.toml", tmp_path)
        assert refused.value.why.startswith(f"[{table}] {key} = ")


def test_unknown_keys_and_wrong_values_are_named_all_at_once(tmp_path, pages):
    said = []
    files = {f"{number}.toml": text.partition("\n") for number, text in enumerate(FILES)}
    for name, (_, _, text) in files.items():
        (tmp_path / name).write_text(text)
    for name in (*files, "narval", "./narval.toml"):
        with pytest.raises(BadInput) as refused:
            planning.find_site(name, tmp_path)
        heading = files[name][0] if name in files else name
        why = "" if heading == "no TOML" else refused.value.why
        said.append(f"## {heading}\n{refused.value.what}\n{why}\ntry: {refused.value.fix}\n")
    pages({"refusals.txt": "\n".join(said).replace(str(tmp_path), "HERE")})


def test_init_writes_what_is_found_here_and_every_other_key_as_a_comment(tmp_path, pages):
    (tmp_path / "mine.toml").write_text('name = "mine"\n[node]\ngpus = 2\n')
    (tmp_path / "plain.toml").write_text('name = "plain"\n')
    for name in ("slurm/sbatch", "engine/hawkears"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch(mode=0o755)
    said = []
    for path, site in (("", None), ("slurm", "sockeye"), ("slurm engine", "mine.toml"), ("", "./plain.toml")):
        environ = {"PATH": ":".join(str(tmp_path / one) for one in path.split())}
        found, values = planning.find_here(environ, tmp_path, site)
        words = [f"{name}: {text}" for name, text in found if name != "GPUs"]  # those of the machine of the tests
        (tmp_path / "badcjobs.toml").write_text(planning.project_text(values))
        project = Project.read([], tmp_path)
        first, usual = (one.make(RunSettings, {"source": ["a"]}, "run") for one in (project, Project()))
        assert first == usual
        made = project.make(SubmitSettings, {}, "submit")
        submit = {key: value for key, value in asdict(made).items() if value != getattr(SubmitSettings(), key)}
        said.append("\n".join([f"## PATH={path}, site {site}", *words, f"{values}", f"read as {submit}", ""]))
    text = planning.project_text(planning.find_here({"PATH": str(tmp_path / "slurm")}, tmp_path, "sockeye")[1])
    pages({"found.txt": "\n".join(said).replace(str(tmp_path), "HERE"), "badcjobs.toml": text})


def test_the_verdict_names_what_could_not_be_checked():
    found = planning.check_facts(facts_of("'slurm.trouble=Unable to contact slurm controller'"))
    verdict = planning.remarks_text(found).splitlines()[0]
    assert verdict == "0 problems and 1 warning: ready; not checked: Slurm"
    assert planning.Checked(tuple(found), None, Asked(), None).to_dict()["not_checked"] == ["Slurm"]
