"""What a database tells of tuning, as PNG and SVG: best so far over time, importance of each axis.

Takes numbers as `kgen plot --json` prints them, writes two files. matplotlib is an optional extra,
imported where something is drawn. Must not import torch.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Final

from kgen.bench.plot import outputs, require_matplotlib, save
from kgen.errors import UsageError

#: With more problems than these, lines have no names: only their median and spread are told apart.
NAMED: Final = 10


def plot_progress(curves: dict[str, list[dict[str, float]]], title: str, path: Path) -> list[Path]:
    """Best so far over seconds and over trials; a line a problem, over the best that it ever had.

    `curves` by shapes line: points of seconds, num_trials and best_us. Raises UsageError for none.
    """
    if not curves:
        raise UsageError("nothing to plot: no problem asked for has a timed trial on this device")
    files = outputs(path)
    figure = require_matplotlib().Figure(figsize=(11.0, 5.0), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 2, sharey=True),
        ("seconds", "num_trials"),
        ("seconds of tuning", "trials"),
        strict=True,
    ):
        for shape, points in curves.items():
            least = min(point["best_us"] for point in points)
            axes.step(
                [point[name] for point in points],
                [point["best_us"] / least for point in points],
                where="post",
                label=shape,
                linewidth=1.2 if len(curves) <= NAMED else 0.6,
            )
        axes.set_xlabel(label)
        axes.axhline(1.0, color="grey", linewidth=1)
        axes.grid(alpha=0.3)
        axes.set_ylim(0.995, max(1.05, _highest(curves)))
    figure.axes[0].set_ylabel("best so far / best of all")
    if len(curves) <= NAMED:
        figure.axes[1].legend(fontsize=7)
    figure.suptitle(f"{title}, {len(curves)} problems" if len(curves) > 1 else title, fontsize=9)
    return save(figure, files)


def _highest(curves: dict[str, list[dict[str, float]]]) -> float:
    """Where the axis ends: nine of ten problems start below, the worst first trial decides not."""
    starts = sorted(
        points[0]["best_us"] / min(point["best_us"] for point in points)
        for points in curves.values()
    )
    return 1.0 + 1.1 * (starts[ceil(0.9 * len(starts)) - 1] - 1.0)


def plot_importance(shares: dict[str, dict[str, float]], title: str, path: Path) -> list[Path]:
    """A bar an axis: the mean share over the problems, a dot for each of them.

    `shares` by shapes line and axis. Raises UsageError for none.
    """
    if not shares:
        raise UsageError(
            "nothing to plot: no problem asked for has enough timed configurations on this device"
        )
    files = outputs(path)
    names = dict.fromkeys(axis for share in shares.values() for axis in share)
    means = {name: sum(s.get(name, 0.0) for s in shares.values()) / len(shares) for name in names}
    ordered = sorted(means, key=means.__getitem__)
    figure = require_matplotlib().Figure(
        figsize=(8.0, 1.5 + 0.35 * len(ordered)), layout="constrained"
    )
    axes = figure.add_subplot()
    axes.barh(ordered, [means[name] for name in ordered], color="tab:blue", alpha=0.6)
    for share in shares.values():
        axes.plot([share.get(name, 0.0) for name in ordered], ordered, "k.", markersize=3)
    axes.set_xlim(0.0, 1.0)
    axes.set_xlabel("share of importance (PED-ANOVA, fastest tenth against all tried)")
    axes.grid(axis="x", alpha=0.3)
    many = f", mean and {len(shares)} problems" if len(shares) > 1 else ""
    axes.set_title(f"{title}{many}", fontsize=9)
    return save(figure, files)
