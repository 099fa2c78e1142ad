"""The project file and the table of settings: option, --config KEY=VALUE, file, default; all mistakes together."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rooms.cli import explain_moved_option, settings_text
from rooms.planning import project_text
from rooms.root import (
    NAME,
    OPTIONS_ONLY,
    SETTINGS,
    TABLES,
    BadInput,
    ProbeSettings,
    Project,
    RunSettings,
    SubmitSettings,
)

EMPTY = Path(__file__).parent / "no-project-file"  # a folder with no badcjobs.toml in it or above


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "badc.toml"


def read(*config: object, cwd: Path = EMPTY) -> Project:
    return Project.read([str(word) for word in config], cwd)


def make(*config: object, **flags: Any) -> RunSettings:
    return read(*config).make(RunSettings, {"source": ["m.csv"], **flags}, "run")


def refusal(*config: object, **flags: Any) -> BadInput:
    with pytest.raises(BadInput) as refused:
        make(*config, **flags)
    assert refused.value.exit_code == 2
    return refused.value


def test_without_file_and_flags_the_defaults_hold() -> None:
    assert make() == RunSettings(source=("m.csv",))
    assert make().engine == "hawkears"


def test_the_file_lies_over_the_defaults_and_the_flags_over_the_file(config: Path) -> None:
    config.write_text('[run]\nengine = "demo"\nretries = 7\ninterval = 5\nengine_arg = ["--burn-s=1"]\n')
    settings = make(config, retries=1, interval=None)
    assert (settings.engine, settings.retries, settings.interval_s) == ("demo", 1, 5.0)
    assert settings.engine_args == ("--burn-s=1",)


def test_a_flag_given_as_false_or_zero_wins_over_the_file(config: Path) -> None:
    config.write_text('[run]\nengine = "demo"\nresume = true\nretries = 3\nemit_gpu_telemetry = true\n')
    settings = make(config, resume=False, retries=0, emit_gpu_telemetry=False)
    assert (settings.resume, settings.retries, settings.telemetry) == (False, 0, False)


def test_the_source_may_come_from_the_file(config: Path) -> None:
    config.write_text('[run]\nsource = ["a.csv", "/data/b"]\n')
    assert make(config, source=None).source == (str(config.parent / "a.csv"), "/data/b")


def test_the_nearest_project_file_is_read_from_the_working_folder_upwards(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / NAME).write_text("[run]\nretries = 7\n")
    assert read(cwd=deep).file == tmp_path / NAME
    (tmp_path / "a" / NAME).write_text("[run]\ngrace_s = 5\n")
    nearest = read(cwd=deep)
    assert (nearest.file, nearest.get("run", "retries"), nearest.get("run", "grace_s")) == (
        tmp_path / "a" / NAME,
        None,
        5.0,
    )
    assert read(tmp_path / NAME, cwd=deep).get("run", "retries") == 7  # --config FILE: no other file is read


def test_relative_paths_start_at_the_file_and_those_of_the_command_line_at_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(
        'site = "./mysite.toml"\n[run]\nroot = "audio"\nout = "runs"\nhawkears_python = "python3"\nsimulate = 3\n'
        '[probe]\nkeep = "kept"\n'
    )
    project = read(tmp_path / NAME, "run.hawkears_root=models")
    settings = project.make(RunSettings, {"source": ["m.csv"]}, "run")
    assert (settings.root, settings.out) == (str(tmp_path / "audio"), tmp_path / "runs")
    assert (settings.hawkears_python, settings.simulate, settings.hawkears_root) == ("python3", "3", "models")
    assert project.site == str(tmp_path / "mysite.toml")
    assert project.make(ProbeSettings, {}, "probe").keep == str(tmp_path / "kept")
    (tmp_path / NAME).write_text('site = "sockeye"\n[run]\nhawkears_python = "env/bin/python"\nsimulate = "s.toml"\n')
    project = read(tmp_path / NAME)
    assert project.site == "sockeye"
    assert project.get("run", "hawkears_python") == str(tmp_path / "env/bin/python")
    assert project.get("run", "simulate") == str(tmp_path / "s.toml")


def test_every_field_of_a_table_is_a_setting_and_one_with_an_option_carries_no_unit() -> None:
    of_tables = {"alerts", "hooks", "patterns"}
    for table, kind in TABLES.items():
        assert {f.name for f in fields(kind)} - of_tables == {one.name for one in SETTINGS[table].values()}
    options = [one for settings in SETTINGS.values() for one in settings.values() if one.heading]
    assert not [one.key for one in options if one.key.endswith("_s")]
    assert all(one.help and len(one.help) <= 50 for one in options)  # a line of a help page


def test_the_page_of_settings_and_a_new_project_file_name_every_key(tmp_path: Path) -> None:
    page = settings_text()
    new = tmp_path / NAME
    new.write_text(project_text({}))
    assert read(new).values["run"] == {}  # comments only
    new.write_text(re.sub("(?m)^# (?=[a-z_]+ = )", "", new.read_text()))  # every default and every example is accepted
    project = read(new)
    for table, settings in SETTINGS.items():
        for key in settings.keys() - {*OPTIONS_ONLY}:
            assert re.search(rf"(?m)^    {key} ", page), key
            if table in ("run", "submit", "plan", "probe"):
                assert key in project.values[table], key


def test_each_table_takes_its_options() -> None:
    made = read("submit.requeues=3", "submit.setup=['module load gcc']").make(SubmitSettings, {"tasks": 4}, "submit")
    assert (made.requeues, made.setup, made.tasks, made.cluster) == (3, ("module load gcc",), 4, "slurm")


def test_a_command_alone_chooses_the_command_engine() -> None:
    assert make(command="x {input} {output}").engine == "command"


@pytest.mark.parametrize(
    ("key", "toml", "what"),
    [
        ("retries", '"two"', '= "two" must be a whole number'),
        ("retries", "2.0", "= 2.0 must be a whole number"),
        ("retries", "true", "= true must be a whole number"),
        ("resume", "1", "= 1 must be true or false"),
        ("interval", '"1"', '= "1" must be a number'),
        ("interval", "true", "= true must be a number"),
        ("engine_arg", '"--x"', '= "--x" must be a list of strings: ["--x"]'),
        ("engine_arg", "[1, 2]", "= [1, 2] must be a list of strings"),
        ("root", "3", "= 3 must be a string"),
        ("interval", "0.001", "= 0.001 must be at least 0.01"),
        ("interval", "nan", "= nan must be a finite number"),
        ("interval", "inf", "= inf must be a finite number"),
        ("backoff_s", "-1", "= -1.0 must be at least 0"),
        ("simulate", "0", '= "0" must be at least 1, or a file'),
        ("max_gpus", "-2", "= -2 must be at least 1"),
        ("engine", '"birdnet"', '= "birdnet" must be one of hawkears, hawkears1, command, demo'),
        ("stage", '"maybe"', '= "maybe" must be one of auto, always, never'),
        ("cut", '"yes"', '= "yes" must be true or false, or "auto"'),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_place(config: Path, key: str, toml: str, what: str) -> None:
    config.write_text(f"[run]\n{key} = {toml}\n")
    assert refusal(config).what == f"{config}, line 2: [run] {key} {what}"


def test_a_flag_of_the_wrong_size_is_named_as_a_flag() -> None:
    assert refusal(max_gpus=0).what == "--max-gpus = 0 must be at least 1"


@pytest.mark.parametrize("text", ["abc", "-5", "1:2:3:4", "UNLIMITED", "1:99", "1:60:00"])
def test_a_stop_after_that_is_no_time_is_refused(text: str) -> None:
    said = "must be minutes, H:M:S or D-H:M:S, such as 90 or 12:00:00"
    assert refusal(f"run.stop_after='{text}'").what == f'--config run.stop_after = "{text}" {said}'


@pytest.mark.parametrize(
    ("text", "value"), [("90", "90"), ('"90"', "90"), ("01:30:00", "01:30:00"), ("1-0:00:00", "1-0:00:00"), ("", None)]
)
def test_a_stop_after_may_be_a_number_a_time_or_empty(text: str, value: str | None) -> None:
    assert make(f"run.stop_after={text}").stop_after == value


def test_one_key_lies_over_the_file_and_an_option_over_both(config: Path) -> None:
    config.write_text('[run]\ngrace_s = 5\nretries = 7\nengine = "demo"\n')
    settings = make("run.grace_s=60", config, "run.retries=3", retries=1)
    assert (settings.grace_s, settings.retries, settings.engine) == (60.0, 1, "demo")


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("run.stage=always", "stage", "always"),
        ('run.stage="always"', "stage", "always"),
        ("run.engine_arg=['-x', 'y=z']", "engine_args", ("-x", "y=z")),
        ("run.retry_failed=false", "retry_failed", False),
        ("run.cut=auto", "cut", None),
        ("run.cut=true", "cut", True),
        ("run.root=a = 3", "root", "a = 3"),
        ("run.root=2026-07-01", "root", "2026-07-01"),
        ("run.root=", "root", ""),
    ],
)
def test_the_value_of_a_key_is_toml_and_a_bare_word_is_a_text(word: str, name: str, value: object) -> None:
    settings = make(word)
    assert getattr(settings, name) == value


def test_at_most_one_file_is_read(config: Path) -> None:
    config.write_text("[run]\n")
    refused = refusal(config, "run.grace_s=3", "b/c=d.toml")
    assert refused.what == f"--config names 2 files: {config}, b/c=d.toml"


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("run.grace=5", "run.grace_s"),
        ("grace_s=5", "run.grace_s"),
        ("runs.retries=5", "run.retries"),
        ("alerts.idle=3", "alerts.idle_s"),
        ("recording.patterns=[]", "recordings.patterns"),
    ],
)
def test_an_unknown_key_on_the_command_line_is_named_with_the_nearest_one(word: str, near: str) -> None:
    assert refusal(word).what == f"--config {word.partition('=')[0]}: unknown key; did you mean {near}?"


def test_a_key_without_a_value_and_a_table_as_a_key_are_named() -> None:
    assert refusal("run.grace_s").fix == "--config run.grace_s=VALUE"
    assert refusal("run=1").what == "--config run is a table: --config run.KEY=VALUE"


def test_a_shard_in_a_file_is_refused_because_all_tasks_would_do_the_same_part(config: Path) -> None:
    config.write_text('[run]\nshard = "0/2"\n')
    assert "line 2: [run] shard: this can only be an option, --shard" in refusal(config).what
    assert "this can only be an option" in refusal("run.shard=0/2").what
    assert make(shard="0/2").shard == "0/2"


def test_an_empty_out_is_no_run_folder(config: Path) -> None:
    config.write_text('[run]\nout = "runs/x"\n')
    assert make(config, out="").out is None
    assert make("run.out=''").out is None


def test_an_empty_command_is_refused() -> None:
    assert refusal(command="").what == refusal(engine="command").what


def test_a_text_in_place_of_a_list_is_shown_as_a_list(config: Path) -> None:
    config.write_text('[run]\nsource = "m.csv"\n')
    assert refusal(config).what.endswith('source = "m.csv" must be a list of strings: ["m.csv"]')


def test_keys_of_other_tables_can_be_given_alone_as_well(config: Path) -> None:
    config.write_text("[alerts]\nidle_s = 60\ntemperature_c = 70\n")
    settings = make(config, "alerts.temperature_c=75", "recordings.patterns=['{location}/*']")
    assert (settings.alerts.temperature_c, settings.alerts.idle_s) == (75.0, 60.0)
    assert [pattern.text for pattern in settings.patterns] == ["{location}/*"]
    refused = refusal(config, "alerts.temperature_c=0", "recordings.patterns=3")
    assert (refused.why or "").splitlines() == [
        "--config alerts.temperature_c = 0 must be a number above 0",
        "--config recordings.patterns = 3 must be a list of strings",
    ]


def test_a_task_in_another_folder_gets_the_same_settings(config: Path) -> None:
    config.write_text("[run]\nretries = 7\n")
    given = read(config.name, "run.stage=always", "run.root=audio", "alerts.idle_s=9", cwd=config.parent)
    assert given.run_words({"engine": "demo", "resume": False}, Path("/lab")) == [
        f"--config={config}", "--config=alerts.idle_s=9", "--no-resume", "--engine=demo", "--root=/lab/audio",
        "--config=run.stage=always",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "--grace", "5"], "--config run.grace_s=5"),
        (["submit", "--stop-after=1:00:00"], "--config run.stop_after=1:00:00"),
        (["run", "--no-cut", "x"], "--config run.cut=false"),
        (["run", "--retry-failed"], "--config run.retry_failed=true"),
        (["submit", "--requeues", "9"], "--config submit.requeues=9"),
        (["probe", "--keep=here"], "--config probe.keep=here"),
        (["submit", "july.csv", "--chunk-length", "294"], "badcjobs submit july.csv -- --chunk-length 294"),
        (["plan", "--no-resume"], "badcjobs plan -- --no-resume"),
        (
            ["submit", "a b", "--engine", "demo", "--tasks", "3", "--simulate=2", "--", "--retries", "1"],
            "badcjobs submit 'a b' --tasks 3 -- --engine demo --simulate=2 --retries 1",
        ),
        (["submit", "--setup", "module load x"], "--config 'submit.setup=[\"module load x\"]'"),
        (["run", "--no-keep-raw"], "--config run.keep_raw=false"),
        (["run", "--tasks", "3"], "badcjobs submit … --tasks 3"),
    ],
)
def test_an_option_that_has_moved_is_refused_with_a_line_to_paste(words: list[str], line: str) -> None:
    option = next(word for word in words if word.startswith("--")).partition("=")[0]
    found = explain_moved_option(option, words, words[0])
    assert found is not None
    assert found[1] == line
    assert explain_moved_option("--speed", ["run", "--speed", "9"], "run") is None


def test_a_text_that_is_not_utf8_is_refused_before_it_reaches_a_file() -> None:
    assert refusal(root="caf\udce9").what == '--root = "caf\udce9" is not UTF-8'
    assert refusal(engine_arg=["ok", "caf\udce9"]).what == '--engine-arg = ["ok", "caf\udce9"] is not UTF-8'


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_one(config: Path) -> None:
    config.write_text("# mine\n[run]\nretrys = 3\n")
    assert refusal(config).what == f"{config}, line 3: [run] retrys: unknown key; did you mean run.retries?"
    config.write_text("[run]\nxyzzy = 3\n")
    assert refusal(config).what == f"{config}, line 2: [run] xyzzy: unknown key"
    assert refusal(config).fix == "badcjobs guide settings   (lists every key)"


@pytest.mark.parametrize(
    ("text", "near"),
    [("retries = 3\n", "run.retries"), ("[runs]\nretries = 3\n", "run"), ("[run]\ntasks = 3\n", "submit.tasks")],
)
def test_a_setting_outside_its_table_is_named(config: Path, text: str, near: str) -> None:
    config.write_text(text)
    assert refusal(config).what.endswith(f": unknown key; did you mean {near}?")


def test_a_run_that_is_no_table_is_named(config: Path) -> None:
    config.write_text("run = 3\n")
    assert refusal(config).what == f"{config}, line 1: run must be a table: [run]"


def test_all_mistakes_of_a_file_are_named_in_one_message(config: Path) -> None:
    config.write_text('speed = 1\n[run]\nretrys = 3\nretries = "x"\nengine = "fast"\n[submit]\ntime = "soon"\n')
    refused = refusal(config)
    assert refused.what == "these settings cannot be used"
    lines = (refused.why or "").splitlines()
    for piece in ("line 1: speed: unknown key", "line 3: [run] retrys: unknown key; did you mean run.retries?",
                  'line 4: [run] retries = "x"', 'line 5: [run] engine = "fast" must be one of',
                  'line 7: [submit] time = "soon" must be minutes'):  # fmt: skip
        assert sum(piece in line for line in lines) == 1, piece
    assert len(lines) == 5


def test_all_mistakes_of_the_options_are_named_in_one_message() -> None:
    refused = refusal(interval=-1.0, retries=-1, source=[])
    assert (refused.why or "").splitlines() == [
        "--interval = -1.0 must be at least 0.01",
        "--retries = -1 must be at least 0",
        "SOURCE is missing: a manifest CSV, a folder of audio, or a list",
    ]


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"engine": "command"}, "--engine command needs --command"),
        ({"engine": "demo", "command": "x {input} {output}"}, "--command needs --engine command, not demo"),
        ({"source": []}, "SOURCE is missing: a manifest"),
        ({"source": None}, "SOURCE is missing: a manifest"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: dict[str, Any], what: str) -> None:
    assert what in refusal(**flags).what


def test_a_config_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone.toml").what == f"{tmp_path}/gone.toml does not exist"
    (tmp_path / "bad.toml").write_text("[run\n")
    assert refusal(tmp_path / "bad.toml").what == f"{tmp_path}/bad.toml cannot be read"
    (tmp_path / "latin.toml").write_bytes(b'[run]\nroot = "caf\xe9"\n')
    assert refusal(tmp_path / "latin.toml").what == f"{tmp_path}/latin.toml cannot be read"
    assert refusal(tmp_path).what == f"{tmp_path} cannot be read"


def test_the_limits_of_alerts_come_from_a_table_of_their_own(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[alerts]\ntemperature_c = 75\nidle_s = 60.5\n")
    alerts = make(config).alerts
    assert (alerts.temperature_c, alerts.idle_s, alerts.memory_percent) == (75.0, 60.5, 90.0)


def test_who_is_called_comes_from_the_same_table_and_is_kept_without_secrets(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    lines = ["[alerts]", "idle_s = 60", 'command = "say --token xyzzy"']
    config.write_text("\n".join([*lines, "min_interval_s = 60"]))
    settings = make(config)
    assert settings.hooks.command == "say --token xyzzy"
    assert settings.alerts.idle_s == 60
    kept = json.loads(settings.to_json(tmp_path))["alerts"]
    assert kept["command"] == "say …"
    assert (kept["min_interval_s"], kept["idle_s"]) == (60, 60)
    assert "xyzzy" not in repr(settings) + settings.to_json(tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[alerts]\ncommand = ''\n", "[alerts] command must name a program"),
        ("[alerts]\nmin_interval_s = 'x'\n", "[alerts] min_interval_s = 'x' must be a number, 0 or above"),
        ("[alerts]\nheat = 3\n", "[alerts] heat: unknown key"),
        ("[alerts]\nidle_s = 0\n", "[alerts] idle_s = 0 must be a number above 0"),
        ("[alerts]\nidle_s = nan\n", "[alerts] idle_s = nan must be a number above 0"),
        ("[alerts]\nidle_s = true\n", "[alerts] idle_s = True must be a number above 0"),
        ("alerts = 3\n", "alerts must be a table: [alerts]"),
    ],
)
def test_a_wrong_limit_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    config = tmp_path / "run.toml"
    config.write_text(text)
    with pytest.raises(BadInput, match=re.escape(complaint)):
        make(config)


def test_what_failed_is_left_alone_only_where_earlier_tasks_are_looked_at() -> None:
    assert "retry_failed = false needs --resume" in refusal("run.retry_failed=false", resume=False).what
