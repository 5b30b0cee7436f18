"""Several real jobs through one bottleneck, beside what was extrapolated from one of them alone.

    python -m experiments.burstiness.jobs --out experiments/burstiness/results     about ten minutes

Every job is DDP of ResNet-50 between two hosts of different racks; all share the racks' uplinks. One job
runs alone and is captured; 2 and 4 of them are extrapolated from that, then run, started together and, in a
second round, spread evenly over one step of the job alone. What is compared is how much longer a step takes
and what the uplink drops.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.burstiness.measure import read_host, read_steps, several
from mlfabric.errors import FabricError
from mlfabric.lab import Lab
from mlfabric.lab.capture import Captures
from mlfabric.scenario import parse
from mlfabric.traffic import Link, find_rhythm
from mlfabric.units import format_rate, parse_rate

HERE = Path(__file__).parent
SCENARIO = """
name = "burst-jobs"
[network]
rate = "{host_rate}"
queue = "{queue_bytes}"
[[racks]]
name = "left"
rate = "{uplink}"
[[racks]]
name = "right"
rate = "{uplink}"
[[hosts]]
name = "a"
count = {jobs}
rack = "left"
[[hosts]]
name = "b"
count = {jobs}
rack = "right"
"""


@dataclass(frozen=True)
class Setting:
    host_rate: str = "200mbit"
    uplink: str = "300mbit"
    queue_bytes: int = 512_000
    compute_s: float = 8.0
    steps: int = 7
    skip: int = 1
    model: str = "resnet50"
    way: str = "ddp-mlfabric"
    most_jobs: int = 4


def start(lab: Lab, job: int, folder: Path, setting: Setting, delay_s: float) -> list[subprocess.Popen[Any]]:
    """Both ranks of a job."""
    folder.mkdir()
    master = lab.host(f"a{job}").address
    command = [sys.executable, "-m", "experiments.burstiness.train", "--way", setting.way]
    command += [
        "--model",
        setting.model,
        "--compute-s",
        str(setting.compute_s),
        "--steps",
        str(setting.steps),
    ]
    command += ["--delay-s", str(delay_s)]
    secret = secrets.token_hex(16)
    started = []
    for rank, host in enumerate((f"a{job}", f"b{job}")):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)]),
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": master,
            "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
            "MLFABRIC_SECRET": secret, "MLFABRIC_RUN_FOLDER": str(folder), "MLFABRIC_HOST": host,
            "MLFABRIC_PROCESSORS": str((os.cpu_count() or 1) / len(lab.scenario.host_names())),
        }  # fmt: skip
        log = (folder / f"rank{rank}.log").open("wb")
        started.append(
            lab.host(host).popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        )
        log.close()
    return started


def run_jobs(lab: Lab, folder: Path, jobs: int, setting: Setting, spread_s: float) -> dict[str, Any]:
    """That many at once; the mean step of all and the uplinks' drops."""
    folder.mkdir()
    before = _drops(lab)
    running = []
    for job in range(jobs):
        running += start(lab, job, folder / f"job{job}", setting, job * spread_s)
    limit = time.monotonic() + setting.steps * (20 * setting.compute_s + 60)
    for process in running:
        if process.wait(max(limit - time.monotonic(), 1.0)) != 0:
            raise FabricError(f"a rank failed; its log is in {folder}")
    steps = [read_steps(folder / f"job{job}", 2, setting.skip).durations_s for job in range(jobs)]
    return {
        "step_s": round(statistics.fmean(statistics.fmean(each) for each in steps), 4),
        "step_s_by_job": [round(statistics.fmean(each), 3) for each in steps],
        "dropped_frames": _drops(lab) - before,
    }


def _drops(lab: Lab) -> int:
    return sum(
        count["dropped_frames"]
        for link, count in lab.counters().items()
        if link.split(".")[0] in ("left", "right")
    )


def compare(setting: Setting, folder: Path) -> dict[str, Any]:
    text = SCENARIO.format(
        host_rate=setting.host_rate,
        uplink=setting.uplink,
        queue_bytes=setting.queue_bytes,
        jobs=setting.most_jobs,
    )
    with Lab(parse(text), name=f"burst-jobs-{os.getpid()}") as lab:
        described = lab.describe()
        ports = {"a0": described["ports"]["a0"]}
        captures = Captures(lab.record, ports, folder / "captures", as_user=described["in_user_namespace"])
        captures.start()
        alone = run_jobs(lab, folder / "alone", 1, setting, 0.0)
        captured = captures.stop()[0]
        if captured.dropped:
            raise FabricError(f"the kernel dropped {captured.dropped} packets of the capture")
        steps = read_steps(folder / "alone" / "job0", 2, setting.skip)
        trace = read_host(Path(captured.file), lab.host("a0").address, "out", steps)
        link = Link(parse_rate(setting.uplink), setting.queue_bytes, setting.queue_bytes / 20)
        rhythm = find_rhythm(trace)
        found: dict[str, Any] = {
            "alone": alone,
            "period_s": None if rhythm is None else round(rhythm.period_s, 3),
            "mean_rate": format_rate(trace.total_bytes * 8 / steps.seconds),
            "jobs": {},
        }
        for jobs in (2, 4):
            predicted = several(trace, jobs, link)
            together = run_jobs(lab, folder / f"{jobs}-together", jobs, setting, 0.0)
            apart = run_jobs(lab, folder / f"{jobs}-apart", jobs, setting, alone["step_s"] / jobs)
            for measured in (together, apart):
                measured["stretch"] = round(measured["step_s"] / alone["step_s"], 4)
            offered = jobs * trace.total_bytes * 8 / steps.seconds / link.rate_bps
            found["jobs"][str(jobs)] = {
                "offered_share_of_link": round(offered, 3),
                "predicted": predicted, "together": together, "apart": apart,
            }  # fmt: skip
            for how, law, measured in (("together", "aligned", together), ("apart", "best", apart)):
                expected = predicted[law]["closed_loop_stretch"]
                print(f"{jobs} jobs {how}: {expected} predicted, {measured['stretch']} measured", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--way", default="ddp-mlfabric")
    asked = parser.parse_args()
    setting = Setting(way=asked.way)
    with tempfile.TemporaryDirectory(prefix="burst-jobs-") as folder:
        found = compare(setting, Path(folder))
    asked.out.mkdir(parents=True, exist_ok=True)
    settings = dataclasses.asdict(setting)
    (asked.out / f"jobs-{asked.way}.json").write_text(
        json.dumps({"settings": settings, **found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    try:
        main()
    except FabricError as error:
        sys.exit(f"error: {error}")
