"""The settings of a run: defaults, then the file, then the flags; all mistakes at once."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from badcjobs.errors import BadInput
from badcjobs.settings import RunSettings, make_settings, settings_by_key

OUT = Path("runs/july")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "badc.toml"


def make(config: Path | None = None, **flags: Any) -> RunSettings:
    return make_settings(OUT, {"source": ["m.csv"], **flags}, config)


def refusal(config: Path | None = None, **flags: Any) -> BadInput:
    with pytest.raises(BadInput) as refused:
        make(config, **flags)
    assert refused.value.exit_code == 2
    return refused.value


def test_without_file_and_flags_the_defaults_hold() -> None:
    assert make() == RunSettings(out=OUT, source=("m.csv",))
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
    config.write_text('[run]\nsource = ["a.csv", "b"]\n')
    assert make_settings(OUT, {"source": None}, config).source == ("a.csv", "b")


def test_every_setting_can_be_given_by_its_flag_name() -> None:
    known = settings_by_key()
    of_tables = {"out", "alerts", "hooks", "patterns"}
    assert {f.name for f in fields(RunSettings)} == {*of_tables, *(f.name for f in known.values())}
    assert all(key.isidentifier() and not key.endswith("_s") for key in known)


def test_a_command_alone_chooses_the_command_engine() -> None:
    assert make(command="x {input} {output}").engine == "command"


@pytest.mark.parametrize(
    ("key", "toml", "what"),
    [
        ("retries", '"two"', "= 'two' must be a whole number"),
        ("retries", "2.0", "= 2.0 must be a whole number"),
        ("retries", "true", "= True must be a whole number"),
        ("resume", "1", "= 1 must be true or false"),
        ("interval", '"1"', "= '1' must be a number"),
        ("interval", "true", "= True must be a number"),
        ("engine_arg", '"--x"', "= '--x' must be a list of texts"),
        ("engine_arg", "[1, 2]", "= [1, 2] must be a list of texts"),
        ("root", "3", "= 3 must be a text"),
        ("interval", "0.001", "= 0.001 must be at least 0.01"),
        ("interval", "nan", "= nan must be a finite number"),
        ("interval", "inf", "= inf must be a finite number"),
        ("backoff", "-1", "= -1.0 must be at least 0.0"),
        ("simulate", "0", "= 0 must be at least 1"),
        ("max_gpus", "-2", "= -2 must be at least 1"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_place(config: Path, key: str, toml: str, what: str) -> None:
    config.write_text(f"[run]\n{key} = {toml}\n")
    assert refusal(config).what == f"{config}: [run] {key} {what}"


def test_a_flag_of_the_wrong_size_is_named_as_a_flag() -> None:
    assert refusal(max_gpus=0).what == "--max-gpus = 0 must be at least 1"


@pytest.mark.parametrize("text", ["abc", "", "-5", "1:2:3:4", "UNLIMITED", "1:99", "1:60:00"])
def test_a_time_left_that_is_no_time_is_refused(text: str) -> None:
    assert refusal(time_left=text).what == (
        f"--time-left = {text!r} must be seconds, M:S or H:M:S, such as 5400 or 1:30:00; in TOML in quotes"
    )


def test_a_time_left_may_be_a_number_in_the_file(config: Path) -> None:
    config.write_text("[run]\ntime_left = 5400\n")
    assert make(config).time_left == "5400"
    assert make(config, time_left="1:30:00").time_left == "1:30:00"
    config.write_text("[run]\ntime_left = true\n")
    assert "time_left = True must be seconds, M:S or H:M:S" in refusal(config).what


def test_a_text_that_is_not_utf8_is_refused_before_it_reaches_a_file() -> None:
    assert refusal(root="caf\udce9").what == "--root = 'caf\\udce9' is not UTF-8"
    assert refusal(engine_arg=["ok", "caf\udce9"]).what == "--engine-arg = ('ok', 'caf\\udce9') is not UTF-8"


def test_an_unknown_key_is_named_with_those_that_are_known(config: Path) -> None:
    config.write_text("[run]\nretrys = 3\n")
    refused = refusal(config)
    assert refused.what.startswith(f"{config}: [run] retrys: unknown key; known are backoff, chunk_length, command,")
    assert "retries" in refused.what


@pytest.mark.parametrize("text", ["retries = 3\n", "[runs]\nretries = 3\n"])
def test_a_setting_outside_its_table_is_named(config: Path, text: str) -> None:
    config.write_text(text)
    assert "settings of a run are in the tables [run] and [alerts]" in refusal(config).what


def test_a_run_that_is_no_table_is_named(config: Path) -> None:
    config.write_text("run = 3\n")
    assert refusal(config).what == f"{config}: run must be a table: [run]"


def test_all_mistakes_of_file_and_flags_are_named_at_once(config: Path) -> None:
    config.write_text('speed = 1\n[run]\nretrys = 3\nretries = "x"\nengine = "fast"\n')
    refused = refusal(config, interval=-1.0, source=[])
    assert refused.what == "these settings cannot be used"
    told = (refused.why or "").splitlines()
    for piece in ("unknown key 'speed'", "retrys: unknown key", "retries = 'x'", "--interval = -1.0", "--engine fast",
                  "no SOURCE was given"):  # fmt: skip
        assert sum(piece in line for line in told) == 1, piece
    assert len(told) == 6


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"engine": "command"}, "--engine command needs --command"),
        ({"engine": "demo", "command": "x {input} {output}"}, "--command goes with --engine command, not with demo"),
        ({"engine": "birdnet"}, "--engine birdnet is not known; engines are hawkears, hawkears1, command, demo"),
        ({"resume": False, "retry_failed": False}, "--no-retry-failed goes with --resume"),
        ({"source": []}, "no SOURCE was given"),
        ({"source": None}, "no SOURCE was given"),
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
    alerts = make_settings(tmp_path, {"source": ["a.csv"]}, config).alerts
    assert (alerts.temperature_c, alerts.idle_s, alerts.memory_percent) == (75.0, 60.5, 90.0)


def test_who_is_called_comes_from_the_same_table_and_is_kept_without_secrets(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    lines = ["[alerts]", "idle_s = 60", 'command = "say --token xyzzy"']
    config.write_text("\n".join([*lines, "min_interval_s = 60"]))
    settings = make_settings(tmp_path, {"source": ["a.csv"]}, config)
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
        ("[alerts]\nheat = 3\n", "[alerts] heat: unknown key; known are temperature_c, memory_percent"),
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
        make_settings(tmp_path, {"source": ["a.csv"]}, config)


def test_wishes_without_free_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--min-memory-mib, --wait goes with --free"):
        make_settings(tmp_path, {"source": ["a.csv"], "min_memory_mib": 100, "wait": 5.0}, None)
