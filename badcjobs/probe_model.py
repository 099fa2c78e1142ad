"""The search for one model of device: what was tried, what is being tried, and what it comes to."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

from badcjobs.errors import BadcjobsError, ExitCode
from badcjobs.model import FITS, Device, Probed, Trial
from badcjobs.probe.search import Bounds, Step, is_over, next_step, usual_is_over
from badcjobs.probe.verdict import judge
from badcjobs.probe_subjects import Subject
from badcjobs.probe_trial import Measure, TrialRun
from badcjobs.probed import ProbeStore
from badcjobs.workers.failures import CONFIGURATION, GPU_LOST, HOST_MEMORY, NO_PROGRAM, RAN_ON_CPU
from badcjobs.workers.watched_engine import Trouble

_HOST_SHARE = 0.8  # of the node's memory; beyond it the kernel may end whoever it likes, us too
_NOT_HERE = frozenset({CONFIGURATION, RAN_ON_CPU, GPU_LOST, NO_PROGRAM})
_LONGEST_WHY = 1500
_FASTER_THAN_ANYTHING = 1e6  # times real time


class ModelSearch:
    """The search for one model of device: what was tried, and what is being tried."""

    def __init__(
        self, subject: Subject, store: ProbeStore, bounds: Bounds, *, margin_percent: float, trial_s: float
    ) -> None:
        self.subject = subject
        self.trials: list[Trial] = list(store.find(subject.key).trials)
        self.problem: BadcjobsError | None = None
        self.host_words: str | None = None
        self.free: list[Device | None] = list(subject.devices)
        self._store = store
        self._bounds = bounds
        self._margin_percent = margin_percent
        self._at: str | None = store.find(subject.key).at
        self._in_flight: list[Step] = []
        self._start_up_s = 0.0
        self._trial_s = trial_s
        self._guess: float | None = None  # how fast a trial was that was too short to count

    def forget(self) -> None:
        """Begin anew."""
        self.trials, self._at = [], None
        self._store.put(Probed(self.subject.key))

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to try."""
        return is_over(self.trials, self._bounds)

    @property
    def probed(self) -> Probed:
        """What is known so far."""
        finished = bool(self.trials) and self.is_over
        known = bool(self.trials) and usual_is_over(self.trials, self._bounds)
        result = judge(self.trials, self._margin_percent, finished=finished) if known else None
        return Probed(self.subject.key, tuple(self.trials), result, finished, self._at)

    def keep(self) -> Probed:
        """Write down what is known so far."""
        self._store.put(self.probed)
        return self.probed

    def next_step(self, host_bytes: int | None) -> Step | None:
        """Return what to try next; never what would fill the memory of the node."""
        if self.problem is not None:
            return None
        self._bounds = self._heed_the_host(host_bytes)
        return next_step(self.trials, self._bounds, self._in_flight)

    def expected_s(self, step: Step) -> float:
        """Return about how long a trial will take; 0: nobody knows."""
        rate = self.rate
        return 0.0 if rate is None else self._start_up_s + self.chunks(step) * step.length_s / rate

    def measure(self, step: Step) -> Measure:
        """Return how much a trial gets."""
        key = self.subject.key
        return Measure(key.workers if step.lean else key.chunks_at_once, self._trial_s)

    def chunks(self, step: Step) -> int:
        """Return how many chunks a trial gets."""
        measure = self.measure(step)
        return measure.lanes * measure.rounds(step.length_s, self.rate)

    @property
    def rate(self) -> float | None:
        """How fast the longest audio was that has been measured."""
        measured = [trial for trial in self.trials if trial.times_real_time]
        return max(measured, key=lambda trial: trial.length_s).times_real_time if measured else self._guess

    def begin(self, step: Step) -> None:
        """Take note of what is being tried."""
        self._in_flight.append(step)

    def end(self, run: TrialRun, told: Trial | Trouble | None) -> bool:
        """Take note of what came of a trial; None: it was broken off. Say whether it was too short to count."""
        self._in_flight.remove(run.step)
        self.free.append(run.plans[0].device)
        if isinstance(told, Trouble):
            self.problem = explain(told, self.subject, run.step)
        elif told is not None and self._guess is None and self.measure(run.step).is_too_short(told):
            self._guess = told.times_real_time or _FASTER_THAN_ANYTHING
            return True
        elif told is not None:
            self.trials.append(told)
            self._at = datetime.fromtimestamp(run.bench.clock.now_ms() / 1000, timezone.utc).strftime("%FT%TZ")
            self._start_up_s = run.start_up_s
            self.keep()
        return False

    def _heed_the_host(self, host_bytes: int | None) -> Bounds:
        """Return the bounds, narrower where longer audio would need more memory of the node than there is."""
        greedy = [t for t in self.trials if t.outcome == FITS and t.host_peak_bytes]
        if host_bytes is None or not greedy:
            return self._bounds
        longest = max(greedy, key=lambda trial: trial.length_s)
        room = _HOST_SHARE * host_bytes / (longest.host_peak_bytes or 1)
        ceiling_s = max(longest.length_s, round(longest.length_s * room))
        if ceiling_s >= self._bounds.longest_s:
            return self._bounds
        self.host_words = (
            f"{self.subject.key.gpu}: nothing longer than {ceiling_s:g} s is tried, for it might take more than"
            f" {100 * _HOST_SHARE:.0f} % of the node's memory ({host_bytes / 2**30:.1f} GiB)"
        )
        return replace(self._bounds, longest_s=ceiling_s)


def explain(trouble: Trouble, subject: Subject, step: Step) -> BadcjobsError:
    """Say what failed, and what to do about it; it was not the device's memory."""
    fix = "badcjobs probe … --keep DIR, then look into DIR/tasks/"
    if trouble.error_class == HOST_MEMORY:
        fix = f"ask for more memory (#SBATCH --mem=64G), or try nothing longer: --max-length {step.length_s / 2:g}"
    elif trouble.error_class in _NOT_HERE:
        fix = "badcjobs check AUDIO --engine …   (with the same options)"
    problem = BadcjobsError(
        f"{subject.key.gpu}: chunks of {step.length_s:g} s failed, but not for want of its memory"
        f" ({trouble.error_class}); no result is kept",
        why=trouble.error.strip()[-_LONGEST_WHY:] or None,
        fix=fix,
    )
    problem.exit_code = ExitCode.NOT_HERE if trouble.error_class in _NOT_HERE else ExitCode.CHUNKS_FAILED
    return problem
