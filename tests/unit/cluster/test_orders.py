"""The options of ``badcjobs submit`` become an order: its array, its times, its script, and every mistake at once."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.cluster import (
    make_order,
    parse_array,
    parse_limit,
    parse_minutes,
    parse_signal,
    suggest_range,
    survey_source,
)
from rooms.model import ArrayShape, Submitted
from rooms.planning import complete, find_site
from rooms.root import BadInput, FrozenRun, Project, RunSettings, SubmitSettings
from rooms.store import Record, asked_of, differences, submit_command, with_words
from support.audio import make_wav
from support.badcjobs_program import MANIFEST_HEADER
from support.brief import page
from support.cases import read_data, read_lines

RUN = ("run", "/data/m.csv", "--out=/scratch/july", "--engine=demo")


@st.composite
def parts(draw):
    """Return a part of an array as text, its indices, and the step that it names."""
    first, count, step = draw(st.integers(0, 30)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    if count == 1:
        return str(first), [first], None
    last = first + step * (count - 1) + draw(st.integers(0, step - 1))  # a range may end between two steps
    indices = list(range(first, last + 1, step))
    return f"{first}-{last}:{step}" if step > 1 else f"{first}-{last}", indices, step


@settings(max_examples=60)
@given(st.lists(parts(), min_size=1, max_size=4), st.none() | st.integers(1, 9))
def test_an_array_has_the_indices_of_its_parts_once_in_order_and_the_step_of_its_last_range(chosen, parallel):
    text = ",".join(part for part, _, _ in chosen) + ("" if parallel is None else f"%{parallel}")
    spec = parse_array(text)
    assert spec.indices == tuple(sorted({index for _, indices, _ in chosen for index in indices}))
    assert spec.step == next((step for _, _, step in reversed(chosen) if step), 1)
    assert spec.parallel == parallel
    instead = suggest_range(spec)
    if instead is None:  # every task finds its place in what Slurm tells it
        shape = ArrayShape(spec.indices[0], spec.step, len(spec.indices))
        assert [shape.position_of(index) for index in spec.indices] == list(range(len(spec.indices)))
    else:
        again = parse_array(instead)
        assert (len(again.indices), again.parallel, suggest_range(again)) == (len(spec.indices), spec.parallel, None)


@settings(max_examples=40)
@given(st.integers(0, 9), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_a_time_is_read_in_every_form_of_sbatch_and_counts_in_whole_minutes(d, h, m, s):
    forms = {
        f"{m}": 60 * m, f"{m}:{s:02d}": 60 * m + s, f"{h}:{m}:{s}": 3600 * h + 60 * m + s,
        f"{d}-{h}": 86400 * d + 3600 * h,
        f"{d}-{h}:{m}": 86400 * d + 3600 * h + 60 * m, f"{d}-{h}:{m}:{s}": 86400 * d + 3600 * h + 60 * m + s,
    }  # fmt: skip
    for text, seconds in forms.items():
        minutes = -(-seconds // 60)
        assert parse_limit(text) == 60 * minutes
        if seconds:
            assert parse_minutes(text) == minutes


MORE = ("array ", "array 1-", "array ٣", "array 4000002", "array 1%٣", "time ", "time ٣", "signal ", "signal USR1@٣")
VALUES = read_lines("sbatch_values.txt")


def answer(parse, text):
    try:
        return parse(text)
    except ValueError as error:
        return f"refused: {error}"


def test_every_value_that_sbatch_refuses_is_refused_with_its_text(pages):
    """The page has the others too: where sbatch makes something of a value that its author cannot have meant."""
    assert parse_array("0-4000001:4000001").indices == (0, 4_000_001)
    said = {}
    for option, value, sbatch in (one.split(" ") for one in (*VALUES, *(f"{one} refused" for one in MORE))):
        parsers = {"array": [parse_array], "signal": [parse_signal], "time": [parse_limit, parse_minutes]}[option]
        answers = [answer(parse, value.replace("␣", " ")) for parse in parsers]
        assert sbatch == "taken" or str(answers[0]).startswith("refused: "), (option, value)
        said[f"{option} {value} ({sbatch})"] = answers
    pages({"values.txt": page(said)})


def order(known="", run=RUN, out=Path("/scratch/july"), cpu_workers=0, **wishes):
    """Make an order for what is known of a run: an array, or so many manifests."""
    frozen, listed = None, None
    if known.endswith("manifests"):
        listed = int(known.split()[0])
    elif known:
        begun = None if known == "no array" else parse_array(known)
        frozen = FrozenRun({}, begun and ArrayShape(begun.indices[0], begun.step, len(begun.indices)))
    options = Project().make(SubmitSettings, wishes, "submit")
    return make_order(options, frozen, listed, out=out, run_arguments=run, cpu_workers=cpu_workers, mistakes=[])


def read_wishes(text):
    wishes = {}
    for key, _, value in (word.replace("⏎", "\n").partition("=") for word in shlex.split(text) if word != "-"):
        if key in ("sbatch", "setup"):
            wishes[key] = (*wishes.get(key, ()), value)
        elif key == "run":
            wishes[key] = ("run", *value.split())
        else:
            number = key in ("tasks", "parallel", "cpus", "gpus_per_task", "requeues", "cpu_workers")
            wishes[key] = Path(value) if key == "out" else int(value) if number else value
    return wishes


def reported(text):
    wishes, _, known = text.partition(" | ")
    try:
        made = order(known, **read_wishes(wishes))
    except BadInput as error:
        return str(error).splitlines()
    return {"spec": made.spec, "indices": len(made.indices), "order": made}


def test_what_is_wished_for_becomes_an_order_or_every_mistake_is_named_with_the_option_to_write(pages):
    cases = read_data("orders.txt").split("\n\n")[1].splitlines()
    pages({"orders.txt": page({text: reported(text) for text in cases})})
    with pytest.raises(BadInput) as refused:
        wrong = {"cpu_workers": 0, "mistakes": ["--engine foo is not known"]}
        make_order(SubmitSettings(time="soon"), None, None, out=Path("o"), run_arguments=(), **wrong)
    why = ["--engine foo is not known", "--time soon is not a time; write minutes, H:M:S or D-H:M:S: 12:00:00"]
    assert ((refused.value.why or "").splitlines(), refused.value.exit_code) == (why, 2)


def test_every_row_of_a_source_is_read_and_the_audio_of_at_most_some_thousand(tmp_path):
    make_wav(tmp_path / "a.wav")
    for many, looked_at in ((3, 3), (3999, 3999), (4001, 2001)):
        rows = [MANIFEST_HEADER, *(f"r,c{number},a.wav,0,600,0,," for number in range(many))]
        (tmp_path / "m.csv").write_text("\n".join(rows) + "\n")
        reported = []
        survey = survey_source(RunSettings(source=("m.csv",)), tmp_path, reported.append)
        assert (survey.chunks, survey.looked_at, reported) == (many, looked_at, [*range(1, many + 1)])


def test_the_command_names_only_what_was_wished_for_and_what_differs_has_both_values():
    plain = submit_command("slurm", RUN, asked_of(order()))
    begin, end = ("badcjobs", "submit", "/data/m.csv", "--out=/scratch/july"), ("--", "--engine=demo")
    assert plain == (*begin, "--cluster=slurm", *end)
    four = submit_command("local", RUN, asked_of(order(gpus_per_task=4)))
    assert four == (*begin, "--cluster=local", "--gpus-per-task=4", *end)  # cores and memory follow from it
    assert with_words(plain, "--again") == (*begin, "--cluster=slurm", "--again", *end)
    many = order(time="1-0", setup=["module load gcc", "x"], sbatch=["--array=1-9:2%4", "--qos=high"], mem="9GB")
    assert submit_command("slurm", RUN, asked_of(many))[5:-2] == (
        "--sbatch=--array=1-9:2%4", "--mem=9G", "--time=1440", "--sbatch=--qos=high",
        '--config=submit.setup=["module load gcc", "x"]',
    )  # fmt: skip
    differing = differences(asked_of(order()), asked_of(order(mem="9G", setup=["a", "b"])))
    assert differing == ["--mem was 7G, now 9G", "submit.setup was not given, now a, b"]


@settings(max_examples=15)
@given(
    tasks=st.integers(1, 50), parallel=st.none() | st.integers(1, 9), gpus_per_task=st.none() | st.integers(0, 8),
    cpus=st.none() | st.integers(1, 24), mem=st.sampled_from([None, "4G", "16gb", "9000", "12000M"]),
    time=st.sampled_from([None, "90", "1:30", "2-0", "12:00:00"]), account=st.sampled_from([None, "st-pi-1"]),
    requeues=st.integers(0, 12),
)  # fmt: skip
def test_the_command_asks_for_the_same_order(**wishes):
    first = order(cpu_workers=1, **wishes)
    words = submit_command("slurm", RUN, asked_of(first))[5:-2]
    settings = [word.removeprefix("--config=submit.").removeprefix("--") for word in words]
    named = (f"{name.replace('-', '_')}={value}" for name, _, value in (one.partition("=") for one in settings))
    again = order(cpu_workers=1, **read_wishes(shlex.join(named)))
    assert again == first and differences(asked_of(first), asked_of(again)) == []


def test_cores_and_memory_are_those_of_the_workers_and_a_job_keeps_what_it_was_submitted_with(tmp_path):
    wished = SubmitSettings(gpus_per_task=4, account="st-lab-1-gpu")

    def completed(wished=wished, submission=None, **flags):
        environ = {"XDG_CACHE_HOME": str(tmp_path)}
        run = Project().make(RunSettings, {"source": ("?",), **flags}, "submit")
        return complete(wished, "fastest", run, find_site("sockeye", tmp_path), environ, tmp_path, submission)

    made = completed()
    assert (made.cpus, made.mem, made.merge_account) == (24, "80G", "st-lab-1")
    three = completed(workers_per_gpu="3", chunk_length=30.0)
    assert (three.cpus, three.mem) == (12, "24G")
    assert completed(replace(wished, mem="9G", cpus=5)).mem == "9G"
    for same in (replace(wished, cluster="local", account=None), SubmitSettings(gpus_per_task=0)):
        assert completed(same) == same
    job = Submitted("4821", None, (0,))
    kept = completed(submission=Record("slurm", job, (), 1, 2, {"--gpus-per-task": 1, "--cpus": 8, "--mem": "18G"}))
    assert (kept.cpus, kept.mem) == (8, "18G"), "although another request would be made now"
