"""Time over the floor, shape by shape, as PNG and SVG.

Takes a report as `kgen bench --floor --json` prints it, writes two files. matplotlib is an optional
extra, imported here only, when something is drawn. Must not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kgen.bench.summary import KGEN, ROW_MAJOR, Row, over_floor
from kgen.errors import KgenError, UsageError

FORMATS: Final = (".png", ".svg")
MARKERS: Final = "os^vDPXd*<>"


def require_matplotlib() -> Any:
    """matplotlib.figure; raises KgenError that says how to get it."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise KgenError(
            f"no plot without matplotlib ({error}): pip install 'kgen[plot]', or print the numbers "
            "with --json and draw elsewhere, a bench's with `kgen plot floor --report FILE`"
        ) from error
    return figure


def outputs(path: Path) -> list[Path]:
    """The files of a plot named `path`, whose ending may be one of FORMATS.

    Raises UsageError for a folder that is not there.
    """
    stem = path.with_suffix("") if path.suffix in FORMATS else path
    if not stem.name or not stem.parent.is_dir():
        raise UsageError(f"plot {path}: expected a file name in a folder that is there")
    return [stem.with_name(stem.name + ending) for ending in FORMATS]


def plot(report: dict[str, Any], path: Path) -> list[Path]:
    """Draw the report; gives the files written. Raises UsageError for one without a floor."""
    rows = sorted((row for row in report["rows"] if row.get("floor")), key=_place)
    if not rows:
        raise UsageError("no row with a floor to plot: run kgen bench with --floor")
    files = outputs(path)
    figure = require_matplotlib().Figure(
        figsize=(max(6.0, 2.0 + 0.24 * len(rows)), 5.0), layout="constrained"
    )
    axes = figure.add_subplot()
    names = [name for name in report["providers"] if not name.endswith(ROW_MAJOR)]
    for marker, name in zip(_cycled(len(names)), names, strict=True):
        _draw(axes, rows, name, marker, report)
    _label(axes, rows, report)
    return save(figure, files)


def save(figure: Any, files: list[Path]) -> list[Path]:
    """Write a figure to all its files; raises UsageError for one that can not be written."""
    for file in files:
        try:
            figure.savefig(file, dpi=150)
        except OSError as error:
            raise UsageError(f"plot {file} can not be written: {error.strerror}") from error
    return files


def _place(row: Row) -> tuple[int, int, int]:
    problem = row["problem"]
    return problem["n"], problem["k"], problem["m"]


def _cycled(count: int) -> str:
    return (MARKERS * (count // len(MARKERS) + 1))[:count]


def _draw(axes: Any, rows: list[Row], name: str, marker: str, report: dict[str, Any]) -> None:
    """One provider's points: kgen full and in front, what is easier hollow."""
    points = [(x, value) for x, row in enumerate(rows) if (value := over_floor(row, name))]
    if not points:
        return
    easier = name in report["reference_only"]
    axes.plot(
        [x for x, _ in points],
        [value for _, value in points],
        marker,
        label=f"{name} (easier)" if easier else name,
        markersize=7 if name == KGEN else 5,
        fillstyle="none" if easier else "full",
        color="black" if name == KGEN else None,
        zorder=3 if name == KGEN else 2,
    )


def _label(axes: Any, rows: list[Row], report: dict[str, Any]) -> None:
    axes.set_yscale("log")
    ticks = [1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xticks(range(len(rows)), [str(row["problem"]["m"]) for row in rows], rotation=90)
    axes.set_xlim(-0.7, len(rows) - 0.3)
    values = [over for row in rows for name in row["providers"] if (over := over_floor(row, name))]
    axes.set_ylim(min([0.95, *values]) * 0.99, max([1.2, *values]) * 1.4)  # room for N x K
    axes.set_xlabel("M, by N x K")
    axes.set_ylabel("time / floor")
    start = 0
    for x, row in enumerate(rows):
        if x + 1 == len(rows) or _place(rows[x + 1])[:2] != _place(row)[:2]:
            n, k = row["problem"]["n"], row["problem"]["k"]
            axes.text(
                (start + x) / 2, 0.99, f"{n}\nx{k}", transform=axes.get_xaxis_transform(),
                ha="center", va="top", fontsize=7,
            )  # fmt: skip
            axes.axvline(x + 0.5, color="grey", linewidth=0.5)
            start = x + 1
    device = report.get("device", {}).get("name", "")
    axes.set_title(f"{device}, {report.get('date', '')[:10]}".strip(", "), fontsize=9)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
