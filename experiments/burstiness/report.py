"""Tables and charts of the results, made from the JSON files of the runs.

python -m experiments.burstiness.report      writes tables.md, curves.png and pacing.png into results/
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAPER = 60.0  # peak to mean on windows of 5 ms, arXiv 2401.00329
PACED = "-paced"


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Runs by name, in the order of rates."""
    files = [file for file in folder.glob("*.json") if not file.name.startswith("jobs-")]
    found = {file.stem: json.loads(file.read_text()) for file in files}
    order = ["100mbit", "400mbit", "1gbit", "2gbit"]
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0].split("-")[0]), item[0])))


def across(run: dict[str, Any], way: str, key: str) -> tuple[float, float]:
    values = [host[way][key] for host in run["hosts"].values()]
    return min(values), max(values)


def span(pair: tuple[float, float], form: str = ".1f") -> str:
    low, high = (format(value, form) for value in pair)
    return low if low == high else f"{low} to {high}"


def figures(runs: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| run | steps | step, s | MB sent per step and host | used share of the link | PtM(5 ms), sent "
        "| received | C/rho | T/tau |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        megabytes = tuple(value / 1e6 for value in across(run, "out", "bytes_per_step"))
        used = tuple(1 / value for value in reversed(across(run, "out", "utilisation")))
        lines.append(
            f"| {name} | {run['steps']} | {run['step_s']['median']:.1f} | {span(megabytes, '.0f')} "  # type: ignore[arg-type]
            f"| 1/{span(used, '.1f')} | {span(across(run, 'out', 'peak_to_mean_5ms'))} "  # type: ignore[arg-type]
            f"| {span(across(run, 'in', 'peak_to_mean_5ms'))} "
            f"| {span(across(run, 'out', 'most_by_line_rate'))} "
            f"| {span(across(run, 'out', 'most_by_period'), '.0f')} |"
        )
    return lines


def orchestration(runs: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| run | sources per host | verdicts | backlog, kB | at random phases, kB | p |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        ports = run["orchestration"]
        judged = [port for port in ports if port["p_value"] is not None]
        counts: dict[str, int] = {}
        for port in ports:
            counts[port["verdict"]] = counts.get(port["verdict"], 0) + 1
        said = ", ".join(f"{count} x {verdict}" for verdict, count in counts.items())
        sources = span((min(p["sources"] for p in ports), max(p["sources"] for p in ports)), ".0f")
        columns = ["-", "-", "-"]
        if judged:
            columns = [
                span(_ends(judged, "backlog_bytes", 1e3), ".0f"),
                span(_ends(judged, "random_backlog_bytes", 1e3), ".0f"),
                span(_ends(judged, "p_value", 1), ".2f"),
            ]
        lines.append(f"| {name} | {sources} | {said} | {' | '.join(columns)} |")
    return lines


def _ends(ports: list[dict[str, Any]], key: str, scale: float) -> tuple[float, float]:
    values = [port[key] / scale for port in ports]
    return min(values), max(values)


def extrapolation(runs: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| run | jobs | worst queue, MB | queue at random phases, MB | loss at random phases | no loss "
        "| interleaved: queue, MB | step, all at once |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        for jobs, found in run["extrapolation"].items():
            worst = found["worst_backlog_bytes"]
            stretch = found["aligned"]["closed_loop_stretch"]
            best = found["best"]["backlog_median_bytes"] / 1e6
            lines.append(
                f"| {name} | {jobs} | {'no bound' if worst is None else f'{worst / 1e6:.1f}'} "
                f"| {found['random']['backlog_median_bytes'] / 1e6:.1f} | {found['random']['loss_mean']:.2%} "
                f"| {found['random']['no_loss_share']:.0%} | {best:.1f} "
                f"| {'not computed' if stretch is None else f'{stretch:.3f}x'} |"
            )
    return lines


def pacing(runs: dict[str, dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for name, after in runs.items():
        before = runs.get(name.removesuffix(PACED))
        if name.endswith(PACED) and before is not None:
            lines += [f"### {name.removesuffix(PACED)}", "", *_pair(before, after), ""]
    return lines[:-1] or ["(not run)"]


def _pair(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    lines = [
        "| host | sent, PtM(5 ms) before | after | times lower | received, before | after | times lower |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    columns: list[list[float]] = [[], [], [], []]
    for host, was in before["hosts"].items():
        now = after["hosts"][host]
        four = [each[way]["peak_to_mean_5ms"] for way in ("out", "in") for each in (was, now)]
        for column, value in zip(columns, four, strict=True):
            column.append(value)
        lines.append(f"| {host} | {_row(four)} |")
    lines.append(f"| mean | {_row([statistics.fmean(column) for column in columns])} |")
    for what in ("median", "mean"):
        one, other = before["step_s"][what], after["step_s"][what]
        lines += [
            "",
            f"Step, {what} of {after['steps']}: {one:.2f} s, paced {other:.2f} s ({other / one - 1:+.2%}).",
        ]
    return lines


def _row(four: list[float]) -> str:
    sent, sent_after, received, received_after = four
    cells = [sent, sent_after, sent / sent_after, received, received_after, received / received_after]
    return " | ".join(f"{cell:.1f}" for cell in cells)


def several_jobs(folder: Path) -> list[str]:
    if not list(folder.glob("jobs-*.json")):
        return ["(not run)"]
    lines = [
        "| jobs | offered | started | predicted step | measured step | predicted loss, open loop "
        "| frames dropped |",
        "|---|---|---|---|---|---|---|",
    ]
    for file in sorted(folder.glob("jobs-*.json")):
        run = json.loads(file.read_text())
        for jobs, found in run["jobs"].items():
            for how, law in (("together", "aligned"), ("apart", "best")):
                expected = found["predicted"][law]
                lines.append(
                    f"| {jobs} ({run['settings']['way']}) | {found['offered_share_of_link']:.0%} of the link "
                    f"| {how} | {expected['closed_loop_stretch']:.2f}x "
                    f"| {found[how]['stretch']:.2f}x | {expected['loss_mean']:.1%} "
                    f"| {found[how]['dropped_frames']} |"
                )
    return lines


def charts(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"gloo": "#c2410c", "mlfabric": "#1d4ed8", "server": "#15803d", "paced": "#7e22ce"}
    styles = {"100mbit": ":", "400mbit": "--", "1gbit": "-", "2gbit": "-."}
    pairs = [name for name in runs if name.endswith(PACED) or name + PACED in runs]
    for title, names, file in (
        ("Peak to mean of what the first host sends", list(runs), "curves.png"),
        ("Pacing: what every host sends", pairs, "pacing.png"),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4.4), dpi=90)
        for name in names:
            hosts = list(runs[name]["hosts"].values())
            for number, host in enumerate(hosts if file == "pacing.png" else hosts[:1]):
                rows = host["out"]["scales"]
                axes.loglog(
                    [row[0] for row in rows], [row[2] for row in rows], styles[name.split("-")[0]],
                    color=colors[name.split("-")[-1]], label=name if not number else None, linewidth=1.4,
                )  # fmt: skip
        axes.axvline(0.005, color="#888", linewidth=0.8)
        axes.axhline(PAPER, color="#888", linewidth=0.8)
        axes.annotate("60:1 at 5 ms", (1.05e-5, PAPER * 0.7), fontsize=8, color="#555")
        axes.set_xlabel("window, s")
        axes.set_ylabel("peak to mean")
        axes.set_title(title, fontsize=10)
        axes.legend(fontsize=7, frameon=False)
        figure.tight_layout()
        figure.savefig(folder / file)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=HERE / "results")
    folder = parser.parse_args().results
    runs = load(folder)
    parts = {
        "Burstiness": figures(runs),
        "Does the application collide with itself?": orchestration(runs),
        "Several such jobs on one link of the same rate, 4 MB of buffer": extrapolation(runs),
        "Pacing": pacing(runs),
        "Several real jobs through one bottleneck": several_jobs(folder),
    }
    text = "\n\n".join(f"## {title}\n\n" + "\n".join(lines) for title, lines in parts.items())
    (folder / "tables.md").write_text(f"# Results, as `report.py` wrote them\n\n{text}\n")
    charts(runs, folder)


if __name__ == "__main__":
    main()
