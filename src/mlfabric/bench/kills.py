"""`mlfabric bench kills`: strikes the processes of a training job on a lab's hosts and judges what follows.

A strike is a kill, a cable cut or a stop (SIGSTOP) of whoever holds a role, at a random moment; some seconds
later the struck one comes back: started anew, plugged in, continued. Judged are how long the other workers
went without a commit, whether a step failed anywhere, and in the end whether every update counts once.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from mlfabric.bench.kills_job import APART, COMMITS_BEFORE, TOGETHER, KillsJob, Life, Seat
from mlfabric.bench.kills_ledger import judge_ledger
from mlfabric.commands.output import console, print_json
from mlfabric.errors import FabricError
from mlfabric.lab import Lab
from mlfabric.scenario import Scenario, parse

ROLES = ("worker", "server", "replica", "aggregator", "scheduler", "rank0")
WAYS = ("kill", "cut", "stop")
BAR_S = 3.0
BACK_S = 30.0  # for the struck one to be of use again, and for the job to be whole
DIVERGENCES = (0.0, 0.05)


class Strike(msgspec.Struct, frozen=True):
    """One strike and what followed."""

    number: int
    role: str
    how: str
    struck: str = ""  # which seat
    held: tuple[str, ...] = ()  # the roles its process held
    after_s: float = 0.0  # since training began, or the last one came back
    stall_s: float | None = None  # the longest another worker went without a commit, until the release
    back_stall_s: float | None = None  # and after it
    failed_steps: int = 0
    dropped: int = 0  # updates that were told to be dropped, of the others
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


class KillsReport(msgspec.Struct, frozen=True):
    seed: int
    bar_s: float
    strikes: tuple[Strike, ...]
    ledgers: int  # jobs whose final model was compared with what its workers were told
    updates: int  # in those
    problems: tuple[str, ...]  # of jobs as a whole
    folder: str = ""  # where the logs of a job that went wrong are


def command(
    times: Annotated[int, typer.Option(help="Strikes for each role and way.")] = 1,
    role: Annotated[list[str] | None, typer.Option(help=f"Whom to strike: {', '.join(ROLES)}.")] = None,
    how: Annotated[list[str] | None, typer.Option(help="kill, cut or stop.")] = None,
    seed: Annotated[int, typer.Option(help="Of the moments, and of whom among equals.")] = 0,
    hold: Annotated[float, typer.Option(help="Seconds until the struck one comes back.")] = 5.0,
    per_job: Annotated[int, typer.Option(help="Strikes against one job, before its ledger is read.")] = 3,
    sync: Annotated[bool, typer.Option(help="Workers go in step: each step is an all-reduce too.")] = False,
    bar: Annotated[float, typer.Option(help="Seconds that others may go without a commit.")] = BAR_S,
    folder: Annotated[Path | None, typer.Option(help="Keep the event logs here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Strike the roles of a training job at random moments; exits with 1 if anything went wrong."""
    roles, ways = role or list(ROLES), how or list(WAYS)
    _check(roles, ROLES, "role")
    _check(ways, WAYS, "way to strike")
    if times < 1 or not 1 <= per_job <= 7 or hold < 0:
        raise FabricError("--times is at least 1, --per-job 1 to 7, --hold not negative")
    if sync and {"worker", "rank0"} & set(roles):
        raise FabricError(
            "with --sync no worker can be struck: the others' step fails with it; give a --role"
        )
    report = run_kills(times, roles, ways, seed, hold, per_job, bar, folder, sync, None if as_json else _tell)
    if as_json:
        print_json(report)
    else:
        _show(report)
    if report.problems or not all(strike.ok for strike in report.strikes):
        raise typer.Exit(1)


def _check(given: list[str], known: tuple[str, ...], what: str) -> None:
    for each in given:
        if each not in known:
            raise FabricError(f"unknown {what} {each!r}; there are {', '.join(known)}")


def run_kills(
    times: int,
    roles: list[str],
    ways: list[str],
    seed: int,
    hold_s: float = 5.0,
    per_job: int = 3,
    bar_s: float = BAR_S,
    folder: Path | None = None,
    sync: bool = False,
    tell: Callable[[Strike], None] | None = None,
) -> KillsReport:
    """All strikes, in an order drawn from the seed; a job that went wrong is followed by a fresh one."""
    rng = random.Random(seed)
    wanted = [(role, how) for role in roles for how in ways for _ in range(times)]
    rng.shuffle(wanted)
    together = [each for each in wanted if each[0] == "rank0"]
    apart = [each for each in wanted if each[0] != "rank0"]
    base = folder or Path(tempfile.mkdtemp(prefix="mlfabric-kills-"))
    rounds = _Rounds(rng, hold_s, bar_s, base, folder is not None, sync, tell)
    for seats, strikes in ((APART, apart), (TOGETHER, together)):
        # Who is rank 0 is struck once in a job: later it is a member like others.
        size = 1 if seats is TOGETHER else per_job
        if strikes:
            with Lab(_scenario(seats), verify=False) as lab:
                for at in range(0, len(strikes), size):
                    rounds.play(lab, seats, strikes[at : at + size])
    if folder is None and not rounds.kept:
        shutil.rmtree(base, ignore_errors=True)
    return KillsReport(
        seed=seed,
        bar_s=bar_s,
        strikes=tuple(rounds.strikes),
        ledgers=rounds.ledgers,
        updates=rounds.updates,
        problems=tuple(rounds.problems),
        folder=str(base) if folder is not None or rounds.kept else "",
    )


def _scenario(seats: tuple[Seat, ...]) -> Scenario:
    lines = ['name = "kills"\nnetwork = { rate = "100mbit" }']
    lines += [f'[[hosts]]\nname = "{seat.name}"\nrate = "{seat.rate}"' for seat in seats]
    return parse("\n".join(lines))


class _Rounds:
    def __init__(
        self,
        rng: random.Random,
        hold_s: float,
        bar_s: float,
        base: Path,
        keep_all: bool,
        sync: bool,
        tell: Callable[[Strike], None] | None,
    ) -> None:
        self._rng = rng
        self._hold_s = hold_s
        self._bar_s = bar_s
        self._base = base
        self._keep_all = keep_all
        self._sync = sync
        self._tell = tell
        self._jobs = 0
        self.strikes: list[Strike] = []
        self.problems: list[str] = []
        self.ledgers = 0
        self.updates = 0
        self.kept = False

    def play(self, lab: Lab, seats: tuple[Seat, ...], wanted: list[tuple[str, str]]) -> None:
        """One job and its strikes; what is left after something went wrong is done with another job."""
        left = list(wanted)
        while left:
            before = len(left)
            folder = self._base / f"job{self._jobs}"
            self._jobs += 1
            divergence = self._rng.choice(DIVERGENCES)
            good = True
            try:
                with KillsJob(lab, seats, folder, divergence, self._sync) as job:
                    job.begin()
                    while left and good:
                        good = self._strike(job, *left.pop(0))
                    self._close(job, folder, divergence)
            except FabricError as error:
                good = False
                self.problems.append(f"{folder.name}: {error}")
                if len(left) == before:  # it did not even begin
                    left.pop(0)
            wrong = self.problems or not all(strike.ok for strike in self.strikes)
            if not good or (wrong and not self.kept):
                self.kept = True
            elif not self._keep_all:
                shutil.rmtree(folder, ignore_errors=True)

    def _strike(self, job: KillsJob, role: str, how: str) -> bool:
        wait_s = self._rng.uniform(0.3, 2.0)
        time.sleep(wait_s)
        job.wait(job.is_followed, BACK_S, "not every shard has a filled replica")
        name = job.holder(role, lambda names: self._rng.choice(sorted(names)))
        struck = job.now(name)
        held = tuple(sorted(struck.roles))
        others = [life for life in job.workers() if life is not struck]
        at = job.strike(name, how)
        time.sleep(self._hold_s)
        released = job.release(name, how)
        problems: list[str] = []
        try:
            job.wait(lambda: _is_back(job, name, released), BACK_S, f"{name} does not come back")
        except FabricError as error:
            problems.append(str(error))
        until = time.monotonic()
        stall = max(_stall(life, at, released) for life in others)
        back = max(_stall(life, released, until) for life in others)
        if stall > self._bar_s:
            problems.append(f"others went {stall:.1f} s without a commit")
        if back > self._bar_s:
            problems.append(f"others went {back:.1f} s without a commit after the return")
        failures = [(life, reason) for life in job.lives for when, reason in life.failures if when >= at]
        problems += [f"a step of {life.seat.name} failed: {reason}" for life, reason in failures]
        dropped = sum(
            story.committed is False and story.at_s >= at
            for life in others
            for story in life.updates.values()
        )
        self._note(
            Strike(
                number=len(self.strikes) + 1,
                role=role,
                how=how,
                struck=name,
                held=held,
                after_s=wait_s,
                stall_s=stall,
                back_stall_s=back,
                failed_steps=len(failures),
                dropped=dropped,
                problems=tuple(problems),
            )
        )
        return not problems

    def _note(self, strike: Strike) -> None:
        self.strikes.append(strike)
        if self._tell is not None:
            self._tell(strike)

    def _close(self, job: KillsJob, folder: Path, divergence: float | None) -> None:
        """The books of a job: every update counts once, the model has learned, all leave in peace."""
        teller = job.finish()
        wrong = judge_ledger(job.lives, folder / "model.npz", divergence)
        self.problems += [f"{folder.name}, ledger: {each}" for each in wrong[:5]]
        self.ledgers += 1
        self.updates += sum(len(life.updates) for life in job.lives)
        first = next(life for life in job.lives if life.losses).losses[0]
        if not teller.model["loss"] < first:
            self.problems.append(f"{folder.name}: the loss was {first:.3g}, is {teller.model['loss']:.3g}")
        job.leave()
        for life in job.lives:
            said = life.said.read_text(errors="replace")
            if "job-failed" in said or "Traceback" in said:
                self.problems.append(f"{folder.name}: {life.said.name} tells of a failure")


def _is_back(job: KillsJob, name: str, released: float) -> bool:
    """All workers commit again, and every leader is followed: the next strike finds what it is meant to."""
    life = job.now(name)
    going = all(
        sum(at > released + 0.5 for at in other.commits()) >= COMMITS_BEFORE for other in job.workers()
    )
    return bool(life.address) and going and job.is_followed() and time.monotonic() > released + 1.5


def _stall(life: Life, since: float, until: float) -> float:
    """The longest time between commits from `since` to `until`."""
    times = sorted(at for at in life.commits() if since <= at <= until)
    edges = [since, *times, until]
    return max(after - before for before, after in pairwise(edges))


def _tell(strike: Strike) -> None:
    verdict = "ok" if strike.ok else "; ".join(strike.problems)
    console().print(
        f"{strike.number:3} {strike.role:10} {strike.how:4} {strike.struck}: stall {strike.stall_s:.2f} s, "
        f"after its return {strike.back_stall_s:.2f} s, {strike.dropped} dropped: {verdict}"
    )


def _show(report: KillsReport) -> None:
    table = Table(title=f"strikes (seed {report.seed})", title_justify="left")
    for name in ("role", "how", "strikes", "median stall", "longest", "longest after return", "failed steps"):
        table.add_column(name, justify="left" if name in ("role", "how") else "right")
    table.add_column("went wrong", justify="right")
    for role, how in ((role, how) for role in ROLES for how in WAYS):
        mine = [strike for strike in report.strikes if (strike.role, strike.how) == (role, how)]
        if not mine:
            continue
        stalls = sorted(strike.stall_s or 0.0 for strike in mine)
        table.add_row(
            role,
            how,
            str(len(mine)),
            f"{stalls[len(stalls) // 2]:.2f} s",
            f"{stalls[-1]:.2f} s",
            f"{max(strike.back_stall_s or 0.0 for strike in mine):.2f} s",
            str(sum(strike.failed_steps for strike in mine)),
            str(sum(not strike.ok for strike in mine)),
        )
    out = console()
    out.print(table)
    out.print(f"ledger: {report.updates} updates of {report.ledgers} jobs compared with the final models")
    for problem in report.problems:
        out.print(problem, style="red")
    if report.folder:
        out.print(f"event logs: {report.folder}")
