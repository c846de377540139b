"""Shapes files that are written: read back as they were, and put in place whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kgen.problem import GemmProblem
from kgen.shape_writer import FORMS, form_of, save, to_text, weight_text
from kgen.shapes import ShapeLine, load_shapes, parse_line

LINES = [
    ShapeLine(GemmProblem("dense", 1, 2112, 7168), 61.0),
    ShapeLine(GemmProblem("dense", 64, 2112, 7168), 61.0),
    ShapeLine(GemmProblem("dense", 64, 576, 7168, d_dtype="fp32"), 0.1),
    ShapeLine(GemmProblem("dense", 7, 576, 7168, num_sms=78), 12345678.0),
    ShapeLine(GemmProblem("dense", 8, 576, 7168)),
]
COMMENTS = {LINES[0].problem: "qkv", LINES[1].problem: "qkv", LINES[4].problem: "last, of all"}


def pairs(lines: list[ShapeLine]) -> list[tuple[GemmProblem, float]]:
    return [(line.problem, line.weight) for line in lines]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("comments", [{}, COMMENTS])
def test_what_is_written_is_read_back(
    form: str, comments: dict[GemmProblem, str], tmp_path: Path
) -> None:
    path = tmp_path / f"shapes.{form}"
    save(path, to_text(LINES, form, comments, ["made by a test", ""]))
    shapes = load_shapes(path)
    assert pairs(shapes.lines) == pairs(LINES)
    assert shapes.notes == []
    text = path.read_text()
    assert text.startswith("# made by a test\n#\n")
    assert text.count("last, of all") == len(comments) // 3


def test_lines_that_differ_in_m_alone_become_one() -> None:
    text = to_text(LINES, comments=COMMENTS)
    assert text.splitlines() == [
        "dense m=1,64 n=2112 k=7168 weight=61  # qkv",
        "dense m=64 n=576 k=7168 d_dtype=fp32 weight=0.1",
        "dense m=7 n=576 k=7168 num_sms=78 weight=12345678",
        "dense m=8 n=576 k=7168                # last, of all",
    ]
    apart = [LINES[0], ShapeLine(LINES[1].problem, 60.0)]
    assert len(to_text(apart).splitlines()) == 2


def test_columns_nobody_needs_are_left_out() -> None:
    assert to_text(LINES[:1], "csv") == "kind,m,n,k,weight\ndense,1,2112,7168,61\n"
    row = '{"kind": "dense", "m": 1, "n": 2112, "k": 7168, "weight": 61}\n'
    assert to_text(LINES[:1], "jsonl") == row


@pytest.mark.parametrize("weight", [1.0, 61.0, 0.1, 1e300, 1 / 3, 123456789.0])
def test_weights_lose_nothing(weight: float) -> None:
    (line,) = parse_line(f"dense m=1 n=8 k=16 weight={weight_text(weight)}")
    assert line.weight == weight


@pytest.mark.parametrize(
    ("name", "form"),
    [("a.txt", "txt"), ("a.CSV", "csv"), ("a.jsonl", "jsonl"), ("a.shapes", "txt")],
)
def test_the_form_follows_from_the_name(name: str, form: str) -> None:
    assert form_of(name) == form


def test_a_file_is_replaced_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "shapes.txt"
    save(path, "one\n")
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    path.chmod(0o640)
    save(path, "two\n")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("two\n", 0o640)
    assert [p.name for p in path.parent.iterdir()] == ["shapes.txt"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "shapes.txt"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        save(path, "text\n")
    assert [p.name for p in tmp_path.iterdir()] == ["shapes.txt"]


def test_links_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    target, link = tmp_path / "real.txt", tmp_path / "link.txt"
    link.symlink_to(target)
    save(link, "text\n")
    assert link.is_symlink()
    assert target.read_text() == "text\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save(pipe, "text\n")
    assert os.read(reader, 10) == b"text\n"
    os.close(reader)
    assert pipe.is_fifo()
