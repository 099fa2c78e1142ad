"""The shape of the package: who may import whom and touch the world, what tests may see; and its README."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import badcjobs

PACKAGE, ROOT = Path(badcjobs.__file__).parent, Path(__file__).parents[3]
# The rooms, from the roof down. A room imports only rooms on lower lines; rooms on one line do not import each other.
HOUSE = (
    ("cli", "api"), ("planning", "live"), ("cluster",), ("task",), ("report",), ("workers", "telemetry"), ("store",),
    ("devices", "sources"),
    ("run_toml", "project", "trust", "settings", "paths", "small_files", "processes", "masking", "locks"),
    ("seams", "errors", "clock", "version"), ("model",), ("words",),
)  # fmt: skip
GROUND = {name for line in HOUSE[-4:-2] for name in line}  # these may stand on each other
FLOOR = {room: number for number, line in enumerate(HOUSE) for room in line}
FACADE = {"badcjobs", "badcjobs.__main__"}  # names for other people's Python, and python -m badcjobs
# Processes of their own, with arguments and pipes of their own.
PROGRAMS = {
    "badcjobs.telemetry.recorder_process", "badcjobs.workers.hawkears_worker", "badcjobs.workers.hawkears1",
    "badcjobs.workers.demo_worker", "badcjobs.cluster.local_watch",
}  # fmt: skip
# Words that only some may use → the modules that may, besides those of cli; and what only the clock may.
ONLY_CLI = {
    # An entrance without a cli above it, and a process that becomes another one.
    r"\bos\.(environb?|getenv)\b|from os import.*env": {"badcjobs.api.python", "badcjobs.workers.hawkears_worker"},
    r"\bsys\.(argv|stdout|stderr)\b|import argparse|logging\.basicConfig|^ *print\((?!.*file=)": PROGRAMS,
    r"os\.putenv|\b(?<![.\w])(sys\.)?(exit|quit)\(|SystemExit|os\._exit|import (getopt|optparse|click|typer|rich)$|"
    r"from sys import.*(exit|argv|std)|logging\.(StreamHandler|FileHandler|config|handlers)|\.(addHandler|setLevel)\b"
    : {"badcjobs.workers.hawkears_worker"},
}  # fmt: skip
WALL_TIME = r"\btime\.time(_ns)?\b|from time import|datetime\.now|utcnow"


def module_name(path):
    parts = ("badcjobs", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room(name):
    """Return the room or ground module that a module belongs to."""
    return ".".join(name.split(".")[1:2])


def imports(name):
    """Yield what of ours a module imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "badcjobs")
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found = (f"{base}.{one.name}" if f"{base}.{one.name}" in MODULES else base for one in node.names)
            yield from (one for one in found if one.split(".")[0] == "badcjobs")


def test_a_room_imports_only_rooms_below_it():
    def allowed(name, other):
        if other == "badcjobs" or room(other) == room(name) or {room(name), room(other)} <= GROUND:
            return True
        return FLOOR[room(other)] > FLOOR[room(name)]

    own = [name for name in MODULES if name not in FACADE]
    assert {room(name) for name in own} == set(FLOOR)
    assert [(name, other) for name in own for other in imports(name) if not allowed(name, other)] == []


def test_no_file_imports_itself_by_way_of_others():
    TopologicalSorter({name: {*imports(name)} for name in MODULES}).prepare()


def test_only_the_command_line_touches_the_world_and_only_the_clock_reads_the_wall_time():
    cli = {name for name in MODULES if room(name) == "cli"}
    for words, may in {**{words: may | cli for words, may in ONLY_CLI.items()}, WALL_TIME: {"badcjobs.clock"}}.items():
        use = re.compile(rf"(?m)^[^#\n]*({words})")
        users = {name for name, path in MODULES.items() if use.search(path.read_text("utf-8"))}
        assert users - may == set() != users, words


def test_slurms_programs_are_called_in_one_module_and_its_variables_are_read_in_one():
    calls = r"\[\"(sbatch|srun|squeue|sacct|sinfo|scontrol)\"|which\(\"(squeue|srun)\""
    reads = r"environ(\.get\(|\[)[\"']S(LURM|BATCH)|_number\(environ"
    for words, module in ((calls, "badcjobs.devices.slurm_programs"), (reads, "badcjobs.devices.allocation")):
        users = {name for name, path in MODULES.items() if re.search(words, path.read_text("utf-8"))}
        assert users == {module}, words


HEAVY = {"pynvml", "submitit", "sqlite_utils", "psutil", "sqlite3", "numpy", "bokeh", "starlette", "uvicorn"}
HELP = "from badcjobs.cli import main; sys.argv = ['badcjobs', '--help']; main()"
RECORDER = "import badcjobs.telemetry.recorder_process, badcjobs.devices.choose, badcjobs.devices.nvml"
# What is run, in a process that starts → what it must not wait for; module names, because it imports modules.
LIGHT = {
    "import badcjobs": {*HEAVY, "badcjobs.api", "badcjobs.store", "badcjobs.model", "json", "pathlib"},
    HELP: {*HEAVY, "badcjobs.cli.run"},
    f"{RECORDER}, badcjobs.devices.nvidia_smi": {"hashlib", "psutil", "socket", "sqlite_utils", "zoneinfo"},
    "import badcjobs.cli.program, badcjobs.task.run_task": {"sqlite_utils"},
}


def test_neither_the_api_nor_help_nor_the_recorder_waits_for_what_is_heavy():
    for code, heavy in LIGHT.items():
        words = f"import sys\ntry:\n    {code}\nfinally:\n    print({heavy} & {{*sys.modules}}, file=sys.stderr)"
        argv = [sys.executable, "-S", "-c", words] if code == "import badcjobs" else [sys.executable, "-c", words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
        assert (done.stderr, done.returncode, "Usage: badcjobs" in done.stdout) == ("set()\n", 0, code == HELP), code


def test_tests_see_rooms_and_the_public_names_but_no_modules_and_nothing_private():
    """So a function may move or be renamed inside its room, and a module be split, and no test changes."""
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [one.name for one in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            home = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            assert not [name for name in (home, *names) if name.startswith("badcjobs.")], path.name
            assert home != "badcjobs" or {*names} <= {*badcjobs.__all__}, path.name
            ours = names if home.startswith(("badcjobs", "rooms")) else []
            assert not [name for name in ours if name[0] == "_" != name[1]], path.name


TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURES = ROOT / "badcjobs" / "guide" / "pictures"


def test_it_has_at_most_900_words_and_its_pictures_are_light_and_dark_small_and_used():
    assert len(TEXT.split()) <= 900
    used = re.findall(r"badcjobs/guide/pictures/([\w-]+\.png)", TEXT)
    expected = {f"{name}-{shade}.png" for name in ("timeline", "live", "terminal") for shade in ("light", "dark")}
    assert set(used) == expected == {path.name for path in PICTURES.iterdir()}
    assert max(path.stat().st_size for path in PICTURES.iterdir()) < 300_000


def test_every_file_that_a_page_names_exists_and_this_version_is_named():
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        links = re.findall(r"\]\((?!http)([^)]+)\)", text)
        files = re.findall(r"\b((?:tests|badcjobs)/[\w./-]+)", text)
        assert links and files and not [name for name in links + files if not (ROOT / name).exists()]
    for page, words in {"CITATION.cff": "\nversion: {}\n", "CHANGELOG.md": "\n## {}"}.items():
        assert words.format(badcjobs.__version__) in (ROOT / page).read_text(encoding="utf-8")


def test_the_rooms_are_drawn_in_the_order_that_the_imports_keep():
    picture = TEXT[TEXT.index("    cli/") :]
    drawn = [tuple(re.findall(r"^(\w+)/|  (\w+)/", line.strip())) for line in picture.splitlines() if "/  " in line]
    rooms = [tuple(first or second for first, second in line) for line in drawn]
    assert rooms == [line for line in HOUSE if line[0] not in ("run_toml", "seams", "model", "words")]
