"""The synchronous step on unequal links, beside Gloo and beside its bound.

    python -m experiments.unequal.run [--most 2]

Settings that results.json holds are not measured again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec

from experiments.points import carry_out, table
from mlfabric.errors import FabricError
from mlfabric.lab.manifest import MachineLoad

HERE = Path(__file__).parent
HOSTS, RATE_MBIT, SIZE = 8, 200, "16MB"
SLOWNESS = (1, 2, 4, 8)
OURS, OTHER = CONTENDERS = ("mlfabric", "gloo")


def _slow(*hosts: int, by: int) -> list[str]:
    return [word for host in hosts for word in ("--slow", f"{host}={RATE_MBIT // by}mbit")]


def _racks(ratio: int, *more: str) -> list[str]:
    return ["--racks", "2", "--uplink", f"{RATE_MBIT * HOSTS // 2 // ratio}mbit", *more]


ONE_SLOW = {by: "equal links" if by == 1 else f"one host at 1/{by}" for by in SLOWNESS}
SETTINGS: dict[str, list[str]] = {
    **{name: _slow(3, by=by) if by > 1 else [] for by, name in ONE_SLOW.items()},
    "two hosts at 1/4": _slow(3, 6, by=4),
    "racks at 4:1": _racks(4),
    "racks at 8:1": _racks(8),
    "racks at 4:1, ranks dealt": _racks(4, "--interleaved"),
    "racks at 8:1, ranks dealt": _racks(8, "--interleaved"),
}


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What one contender needed; as `mlfabric bench allreduce --json` has it."""

    contender: str
    median_s: float
    p10_s: float
    p90_s: float
    bound_s: float
    cpu_s_per_gb: float
    errors: int

    @property
    def over_bound(self) -> float:
        return self.median_s / self.bound_s


class Point(msgspec.Struct, frozen=True, kw_only=True):
    setting: str
    command: str
    times: list[Times]
    busy_share: float
    nice_share: float  # others' work of low priority
    stolen_share: float

    def of(self, contender: str) -> Times:
        return next(each for each in self.times if each.contender == contender)


def measure(setting: str) -> Point:
    words = ["bench", "allreduce", "--lab", str(HOSTS), "--rate", f"{RATE_MBIT}mbit", "--size", SIZE]
    words += [*SETTINGS[setting], "--against", OTHER, "--idle", "0", "--turns", "3", "--in-a-row", "3"]
    words += ["--json"]
    load = MachineLoad()
    done = subprocess.run([sys.executable, "-m", "mlfabric", *words], capture_output=True, text=True)
    load.update()
    if done.returncode != 0:
        raise FabricError(f"{setting}: {done.stderr.strip()}")
    return Point(
        setting=setting,
        command=f"mlfabric {' '.join(words)}",
        times=msgspec.convert(json.loads(done.stdout), list[Times]),
        busy_share=load.busy_share(),
        nice_share=load.nice_share(),
        stolen_share=load.stolen_share(),
    )


def main() -> None:
    points, plot = carry_out(
        HERE / "results.json", Point, list(SETTINGS), lambda point: point.setting, measure
    )
    show(points)
    draw(points, plot)


def show(points: list[Point]) -> None:
    rows = []
    for point in points:
        ours, other = point.of(OURS), point.of(OTHER)
        rows.append(
            [
                point.setting,
                f"{ours.bound_s:.2f} s",
                _written(ours),
                f"{ours.over_bound:.2f}",
                _written(other),
                f"{other.over_bound:.2f}",
                f"{other.median_s / ours.median_s:.2f}",
                f"{point.stolen_share:.1%}",
            ]
        )
    columns = ["links", "bound", "ours", "times the bound", "Gloo", "times the bound", "Gloo / ours"]
    print(table([*columns, "stolen"], rows))


def _written(times: Times) -> str:
    return f"{times.median_s:.2f} s ({times.p10_s:.2f} to {times.p90_s:.2f})"


def draw(points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {point.setting: point for point in points}
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for contender in CONTENDERS:
        at = [by for by, name in ONE_SLOW.items() if name in found]
        over = [found[ONE_SLOW[by]].of(contender).over_bound for by in at]
        axes.plot(at, over, "o-", label=f"{contender}, one slow host")
    for setting, marker in (("racks at 4:1", "s"), ("racks at 8:1", "^")):
        for name, filled in ((setting, "full"), (f"{setting}, ranks dealt", "none")):
            if name in found:
                by = int(setting.split()[-1].split(":")[0])
                for color, contender in zip(("C0", "C1"), CONTENDERS, strict=True):
                    over_bound = found[name].of(contender).over_bound
                    axes.plot(
                        [by],
                        [over_bound],
                        marker,
                        color=color,
                        fillstyle=filled,
                        label=f"{contender}, {name}",
                    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(SLOWNESS, [f"1/{by}" if by > 1 else "1" for by in SLOWNESS])
    axes.set_xlabel("rate of the slow host, or of a rack's uplink for each of its hosts")
    axes.set_ylabel("median / bound")
    axes.set_ylim(0, None)
    axes.legend(fontsize=6)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
