"""Going on where earlier tasks stopped: what is done with the same audio stays done, and looking is cheap."""

import os
import re
from collections import Counter

from support.audio import make_wav
from support.badcjobs_program import CHUNK_S, ON_CPU, Site, array_task, loud, rows
from support.cases import read_data
from support.file_calls import FileCalls
from support.source_files import write_files
from support.task_files import TaskFile

LEFT_ALONE = ("--config", "run.retry_failed=false")
REPORTED = r"(?m)(?:already done|failed in earlier|done earlier|badcjobs: error).*|^  chunks .*|^  failed .*?\)"


class Story:
    """Runs one command after the other, and tells what each did: its exit code, its words and the chunks by state."""

    def __init__(self, site):
        self.site, self.lines = site, list[str]()

    def run(self, name, source, *options):
        done = self.site.run(source, *ON_CPU, *options)
        self.lines += [f"# {name}: exit code {done.exit_code}", *re.findall(REPORTED, done.stderr + done.stdout)]
        if done.exit_code in (0, 1):
            last = max(self.site.task_databases(), key=lambda path: rows(path, "SELECT started_at_ms FROM task"))
            sql = "SELECT status, group_concat(chunk_id, ' ') FROM chunk GROUP BY 1 ORDER BY 1, chunk_id"
            self.lines += [f"  {status}: {names}" for status, names in rows(last, sql)]
            self.lines += [f"  workers: {len(rows(last, 'SELECT 1 FROM worker'))}"]

    def page(self):
        return "\n".join(self.lines).replace(str(self.site.folder), "/…")


def audio(site, name):
    return site.folder / "audio" / f"{name}.wav"


def test_only_what_is_done_with_the_same_audio_is_skipped_and_the_new_result_counts(site, pages):
    manifest, story = site.manifest(8), Story(site)
    for name in ("c006", "c007"):
        audio(site, name).write_bytes(b"not a wav file")
    story.run("two fail", manifest)
    story.run("failures are left alone", manifest, *LEFT_ALONE)
    for name in ("c000", "c006"):  # of the same length, and so of the same size
        make_wav(audio(site, name), CHUNK_S, 1000, loud=loud(2), tone_hz=150)
    make_wav(audio(site, "c001"), 2 * CHUNK_S, 1000)
    manifest.write_text(manifest.read_text().replace("c002.wav,1200,1800", "c002.wav,1300,1900"))
    story.run("a file rewritten, a longer one, a chunk cut otherwise, one repaired", manifest, *LEFT_ALONE)
    job = site.merged()
    assert rows(job, "SELECT chunk_id FROM chunk WHERE status != 'done'") == [("c007",)]
    heard = rows(job, "SELECT chunk_id, count(*) FROM detection GROUP BY 1")
    assert heard[:1] == [("c000", 2)], "that of the new audio"
    story.run("failures are tried again; job.sqlite knows the new audio", manifest)
    story.run("all of it again", manifest, "--no-resume")
    story.run("which cannot be", manifest, "--no-resume", *LEFT_ALONE)
    pages({"runs.txt": story.page()})


def test_a_checksum_outlives_a_copy_without_times_and_a_folder_that_has_grown_is_brought_up_to_date(site, pages):
    manifest, story, folder = site.manifest(2), Story(site), site.folder / "recordings"
    summed = manifest.read_text().replace("0,,", f"0,{'a' * 64},")
    manifest.write_text(summed)
    story.run("with checksums", manifest)
    for name in ("c000", "c001"):
        os.utime(audio(site, name), ns=(1, 1))
    manifest.write_text(summed.replace("a" * 64, "b" * 64, 1))
    story.run("other times, one other checksum", manifest)
    site.out = site.folder / "other"
    for name in ("a", "b"):
        make_wav(folder / f"{name}.wav", 0.3, 1000)
    story.run("a folder", folder)
    os.utime(folder / "b.wav", ns=(1, 1))
    make_wav(folder / "c.wav", 0.3, 1000)
    story.run("one of another time, one more", folder)
    pages({"runs.txt": story.page()})


def test_a_run_is_resumed_checked_submitted_and_merged_by_whichever_path_leads_to_its_audio(site, pages):
    reported = []
    folder, out = site.folder, site.out
    files, *groups = read_data("same_audio.txt").replace("DIR", str(folder)).split("\n=== ")
    write_files(files, folder)
    for number, group in enumerate(groups):
        title, *lines = group.splitlines()
        site.out = out / str(number)
        for line in filter(None, lines):
            where, _, words = line.partition(": ")
            site.folder = folder / where
            given = (*words.split(), "--out", site.out)
            run = site.badcjobs("run", *given, env=array_task(0, [0]))
            check = site.badcjobs("check", *given)
            submit = site.badcjobs("submit", *given, "--cluster=local", "--dry-run")
            assert (run.exit_code, submit.exit_code) == (0, 0), f"{line}\n{run.stderr}\n{submit.stderr}"
            assert "holds a run already" in " ".join(check.stdout.split()), f"{line}\n{check.stdout}"
            assert site.badcjobs("merge", site.out, "--json").json["verdict"] == "done", line
        recordings = rows(site.out / "job.sqlite", "SELECT recording_id, count(*) FROM attempt GROUP BY 1")
        reported += [f"# {title}", *(f"{name}: {tries} try" for name, tries in recordings)]
    pages({"recordings.txt": "\n".join(reported).replace(str(folder)[1:], "DIR")})


def calls_of_first_task(site, tasks):
    """Run the first of so many tasks, two chunks each, after all others have published; return what it touched.

    Without the task's own files: how often it looks at those depends on the time it takes.
    """
    manifest = site.manifest(2 * tasks)
    TaskFile(site.out, job_id="4000", states={"old": "done"}, samples=0).write()
    site.merged()
    TaskFile(site.out, job_id="4001", states={"late": "done"}, samples=0).write()
    for index in range(1, tasks):
        TaskFile(site.out, job_id="4821", index=index, states={f"c{index}": "done"}, samples=0).write()
    calls = FileCalls(site.folder, site.folder.parent / f"calls-{tasks}")
    env = {**array_task(0, range(tasks)), **calls.environ}
    done = site.run(manifest, *ON_CPU, "--config", "run.publish_every_s=60", env=env)
    assert done.exit_code == 0, done.stderr
    found = Counter()
    for (call, path), many in calls.count().items():
        name = str(path.relative_to(site.folder))
        if name.startswith(("run/", "audio/")) and "4821_0." not in name:
            found[call, name] += many
    return found


def test_opens_and_stats_are_constant_in_the_size_of_the_array_and_audio_is_looked_at_once(tmp_path):
    sums = []
    for tasks in (3, 9):
        calls = calls_of_first_task(Site(tmp_path / str(tasks)), tasks)
        touched = {path for _, path in calls}
        assert {path for path in touched if path.startswith("audio/")} == {"audio/c000.wav", f"audio/c{tasks:03d}.wav"}
        assert not [path for path in touched if "4821_" in path], "the databases of its siblings"
        looked = [calls["open", f"run/{name}"] > 0 for name in ("job.sqlite", "tasks/4001_0.r0.gpu1.sqlite")]
        assert looked == [True, True]
        assert calls["open", "run/tasks/4000_0.r0.gpu1.sqlite"] == 0, "job.sqlite lists it"
        sums.append([sum(many for (kind, _), many in calls.items() if kind == call) for call in ("open", "stat")])
    assert sums[0] == sums[1]

    site = Site(tmp_path / "site")
    manifest = site.manifest(2)
    for cut, kinds in (("auto", ("stat", "open")), ("false", ("stat",))):
        # A stat for the fingerprint, a header for its length: the file may be longer than the row.
        site.out = site.folder / cut
        options = ON_CPU if cut == "auto" else (*ON_CPU, "--config", f"run.cut={cut}")
        assert site.run(manifest, *options).exit_code == 0
        seen = FileCalls(site.folder / "audio", tmp_path / f"calls {cut}")
        assert "2 skipped of 2" in site.run(manifest, *options, env=seen.environ).stdout
        assert seen.count() == {(call, audio(site, name)): 1 for call in kinds for name in ("c000", "c001")}
