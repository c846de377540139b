"""Shapes files: the grammar, its three file forms, and what is said about bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgen import shapes
from kgen.errors import ShapesError, UsageError
from kgen.problem import D_DTYPES, GemmProblem
from kgen.shapes import (
    ShapeLine,
    format_line,
    format_shapes,
    load_shapes,
    merge,
    parse_line,
    parse_problem,
    shipped_shapes,
)


def dense(m: int, n: int = 2112, k: int = 7168, **more: object) -> GemmProblem:
    return GemmProblem("dense", m, n, k, **more)  # type: ignore[arg-type]


def problems(text: str) -> list[GemmProblem]:
    return [line.problem for line in parse_line(text)]


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ShapesError) as caught:
        load_shapes(path)
    return str(caught.value)


# The grammar.


def test_the_line_of_the_documentation() -> None:
    assert problems("dense m=1,16,64..512*2 n=2112 k=7168") == [
        dense(m) for m in (1, 16, 64, 128, 256, 512)
    ]


@pytest.mark.parametrize(
    ("item", "values"),
    [
        ("8..40+8", [8, 16, 24, 32, 40]),
        ("8..45+16", [8, 24, 40]),
        ("3..100*3", [3, 9, 27, 81]),
        ("5..5+1", [5]),
        ("5..5*2", [5]),
        ("1,1..4*2,7", [1, 1, 2, 4, 7]),
    ],
)
def test_ranges(item: str, values: list[int]) -> None:
    assert [p.m for p in problems(f"dense m={item} n=16 k=16")] == values


def test_every_field_and_any_order() -> None:
    line = "k=128 d_dtype=fp32,bf16 kind=dense num_sms=0,108 n=64 groups=1 weight=2.5 M=4 # note"
    lines = parse_line(line, "here")
    assert [x.problem for x in lines] == [
        dense(4, 64, 128, d_dtype=d, num_sms=s) for d in ("fp32", "bf16") for s in (0, 108)
    ]
    assert {(x.weight, x.where) for x in lines} == {(2.5, "here")}


@pytest.mark.parametrize("text", ["", "   ", "\t# only a comment", "#dense m=1 n=8 k=16"])
def test_blank_lines_stand_for_nothing(text: str) -> None:
    assert parse_line(text) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("dense m=1 n=8", "k missing"),
        ("m=1 n=8 k=16", "kind missing"),
        ("dense", "m, n, k missing"),
        ("conv m=1 n=8 k=16", "kind='conv'"),
        ("dense m=1 n=8 k=16 x=3", "unknown field 'x'"),
        ("dense m=1 m=2 n=8 k=16", "m is given twice"),
        ("dense dense m=1 n=8 k=16", "'dense': expected field=value"),
        ("dense m=1, 2 n=8 k=16", "'2': expected field=value"),
        ("dense m=1, n=8 k=16", "m='1,': an empty item"),
        ("dense m= n=8 k=16", "m= has no value"),
        ("dense m=1,,2 n=8 k=16", "m='1,,2': an empty item"),
        ("dense m=many n=8 k=16", "m='many'"),
        ("dense m=-4 n=8 k=16", "m='-4'"),
        ("dense m=4.0 n=8 k=16", "m='4.0'"),
        ("dense m=1e9 n=8 k=16", "m='1e9'"),
        ("dense m=1_000 n=8 k=16", "m='1_000'"),
        ("dense m=٣ n=8 k=16", "m='٣'"),
        ("dense m=0 n=8 k=16", "m=0: expected 1"),
        ("dense m=9999999999 n=8 k=16", "m=9999999999"),
        ("dense m=" + "9" * 5000 + " n=8 k=16", "expected a whole number"),
        ("dense m=1 n=12 k=16", "pad N to 16"),
        ("dense m=1 n=8 k=20", "pad K to 32"),
        ("dense m=1 n=8..32+4 k=16", "n=12"),
        ("dense m=1 n=8 k=16 groups=2", "groups=2"),
        ("dense m=1 n=8 k=16 d_dtype=bf17", "d_dtype='bf17'"),
        ("dense m=1 n=8 k=16 num_sms=-1", "num_sms='-1'"),
        ("dense m=1..64 n=8 k=16", "m='1..64'"),
        ("dense m=64..1*2 n=8 k=16", "ends before it begins"),
        ("dense m=1..64*1 n=8 k=16", "factor from 2"),
        ("dense m=0..64*2 n=8 k=16", "start from 1"),
        ("dense m=1..64+0 n=8 k=16", "step of at least 1"),
        ("dense m=1..999999999999+1 n=8 k=16", "use larger steps"),
        ("dense m=1..100001+1 n=8 k=16", "use larger steps"),
        ("dense m=1..1000+1 n=8..8000+8 k=16", "1000000 values"),
        ("dense m=1..99999+1,1..99999+1 n=8 k=16", "use larger steps"),
        ("dense m=1 n=8 k=16 weight=0", "weight='0'"),
        ("dense m=1 n=8 k=16 weight=-1", "weight='-1'"),
        ("dense m=1 n=8 k=16 weight=nan", "weight='nan'"),
        ("dense m=1 n=8 k=16 weight=inf", "weight='inf'"),
        ("dense m=1 n=8 k=16 weight=1,2", "weight='1,2'"),
        ("dense m=1 n=8 k=16 weight=lots", "weight='lots'"),
    ],
)
def test_bad_lines_say_where_and_why(text: str, part: str) -> None:
    with pytest.raises(ShapesError) as caught:
        parse_line(text, "shapes.txt:7")
    assert str(caught.value).startswith("shapes.txt:7: ")
    assert part in str(caught.value)
    assert isinstance(caught.value, UsageError)


def test_parse_problem_wants_exactly_one() -> None:
    assert parse_problem("dense m=64 n=2112 k=7168") == dense(64)
    for text, count in (("", 0), ("dense m=1,2 n=8 k=16", 2)):
        with pytest.raises(ShapesError, match=f"{count} problems; expected one"):
            parse_problem(text)


# Writing back.

one_problem = st.builds(
    GemmProblem,
    kind=st.just("dense"),
    m=st.integers(1, 2**31 - 1),
    n=st.integers(1, 2**20).map(lambda x: 8 * x),
    k=st.integers(1, 2**20).map(lambda x: 16 * x),
    d_dtype=st.sampled_from(D_DTYPES),
    num_sms=st.integers(0, 200),
)


@given(one_problem, st.floats(min_value=1e-300, max_value=1e300))
def test_a_written_line_reads_back(problem: GemmProblem, weight: float) -> None:
    line = ShapeLine(problem, weight, "x")
    assert parse_line(format_line(line), "x") == [line]


def test_a_written_file_reads_back(tmp_path: Path) -> None:
    lines = parse_line("dense m=1..64*2 n=64 k=128 weight=0.1 num_sms=0,108")
    again = load_shapes(write(tmp_path, "s.txt", format_shapes(lines))).lines
    assert [(x.problem, x.weight) for x in again] == [(x.problem, x.weight) for x in lines]
    assert [x.where for x in again] == [f"{tmp_path / 's.txt'}:{i}" for i in range(1, 15)]


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        lines = parse_line(text)
    except ShapesError:
        return
    assert all(isinstance(line, ShapeLine) for line in lines)


# Files.


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "# note\n\ndense m=1,16 n=64 k=128 weight=2 # more\ndense m=4 n=8 k=16\n"),
        ("a.csv", '# note\nKind, m,n,k,weight\n\ndense,"1,16",64,128,2\n# x\ndense,4,8,16,\n'),
        (
            "a.jsonl",
            '{"kind":"dense","m":[1,"16"],"n":64,"k":"128","weight":2,"num_sms":null}\n'
            '# note\n\n{"kind":"dense","m":4,"n":8,"k":16}\n',
        ),
        (
            "a.JSONL",
            '{"kind":"dense","m":"1..16*16","n":64,"k":128,"weight":2}\n'
            '{"kind":["dense"],"m":4,"n":8,"k":16}\n',
        ),
    ],
)
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_three_forms_one_meaning(
    tmp_path: Path, name: str, text: str, bom: bytes, end: str
) -> None:
    path = write(tmp_path, name, bom + text.replace("\n", end).encode())
    found = load_shapes(path)
    assert [(x.problem, x.weight) for x in found.lines] == [
        (dense(1, 64, 128), 2.0),
        (dense(16, 64, 128), 2.0),
        (dense(4, 8, 16), 1.0),
    ]
    assert found.notes == []
    last = text.rstrip("\n").count("\n") + 1
    assert found.lines[-1].where == f"{path}:{last}"


def test_duplicates_are_tuned_once_with_a_note(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "s.txt",
        "dense m=1,2,4 n=64 k=128\ndense m=8,2,4 n=64 k=128 weight=3\ndense m=8,8 n=64 k=128\n",
    )
    found = load_shapes(path)
    assert [(x.problem.m, x.weight) for x in found.lines] == [(1, 1), (2, 4), (4, 4), (8, 5)]
    assert found.notes == [
        f"{path}:2: dense m=2 n=64 k=128 and 1 more given before ({path}:1): "
        "tuned once, weights added",
        f"{path}:3: dense m=8 n=64 k=128 and 1 more given before ({path}:2): "
        "tuned once, weights added",
    ]


def test_merge_keeps_distinct_problems_apart() -> None:
    lines = parse_line("dense m=4 n=64 k=128 num_sms=0,108 d_dtype=bf16,fp32")
    assert merge(lines).lines == lines


def test_all_bad_lines_are_in_one_error(tmp_path: Path) -> None:
    path = write(tmp_path, "s.txt", "dense m=x n=8 k=16\ndense m=1 n=8 k=16\n\nconv m=1 n=8 k=16")
    message = refusal(path).split("\n")
    assert len(message) == 2
    assert message[0].startswith(f"{path}:1: m='x'")
    assert message[1].startswith(f"{path}:4: kind='conv'")


def test_a_long_list_of_bad_lines_is_cut(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "s.txt", "nonsense\n" * 80)).split("\n")
    assert len(message) == shapes.MAX_REPORTED + 1
    assert message[-1] == "... and 30 more bad lines"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("kind,m,n\ndense,1,8\n", "s.csv:1: header lacks the columns k"),
        ("m;n;k\n1;8;16\n", "s.csv:1: header: unknown field 'm;n;k'"),
        ("kind,m,n,k,m\n", "s.csv:1: header: m is given twice"),
        ("kind,m,n,k\ndense,1,16,64,128\n", "s.csv:2: 5 cells under 4 columns"),
        ("kind,m,n,k\ndense,1,8\n", "s.csv:2: 3 cells under 4 columns"),
        ("kind,m,n,k\n\n# x\ndense,,8,16\n", "s.csv:4: m missing"),
        ("kind,m,n,k\ndense,text,8,16\n", "s.csv:2: m='text'"),
        ('kind,m,n,k\ndense,"1,8,16\n', "s.csv:2: not readable as CSV"),
        ('kind,m,n,k\ndense,x,8,16\ndense,"1"2,8,16\n', "s.csv:2: m='x'"),
        ('kind,m,n,k\ndense,x,8,16\ndense,"1"2,8,16\n', "s.csv:3: not readable as CSV"),
        ("kind,m,n,k\n", "holds no problem"),
        ("", "holds no problem"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, part: str) -> None:
    assert part in refusal(write(tmp_path, "s.csv", text))


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"kind":"dense","m":1,"n":8}', "s.jsonl:2: k missing"),
        ("{}", "s.jsonl:2: kind, m, n, k missing"),
        ("[1, 2]", "s.jsonl:2: expected an object"),
        ("dense m=1 n=8 k=16", "s.jsonl:2: not readable as JSON"),
        ("[" * 100_000, "s.jsonl:2: not readable as JSON"),
        ('{"kind":"dense","m":1,"m":2,"n":8,"k":16}', "m is given twice"),
        ('{"kind":"dense","m":1e9,"n":8,"k":16}', "m=1000000000.0: expected a whole number"),
        ('{"kind":"dense","m":true,"n":8,"k":16}', "m=True: expected a whole number"),
        ('{"kind":"dense","m":"text","n":8,"k":16}', "m='text'"),
        ('{"kind":"dense","m":-3,"n":8,"k":16}', "m=-3: expected 1"),
        ('{"kind":"dense","m":0,"n":8,"k":16}', "m=0: expected 1"),
        ('{"kind":"dense","m":[],"n":8,"k":16}', "m=[]: expected a whole number"),
        ('{"kind":"dense","m":{"x":1},"n":8,"k":16}', "expected a whole number"),
        ('{"kind":1,"m":1,"n":8,"k":16}', "kind=1: expected a name"),
        ('{"kind":"dense","m":1,"n":8,"k":16,"weight":true}', "weight=None"),
        ('{"kind":"dense","m":1,"n":8,"k":16,"weight":NaN}', "weight=nan"),
        ('{"kind":"dense","m":' + "9" * 5000 + ',"n":8,"k":16}', "not readable as JSON"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, part: str) -> None:
    good = '{"kind":"dense","m":1,"n":8,"k":16}'
    assert part in refusal(write(tmp_path, "s.jsonl", f"{good}\n{line}\n"))


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "s.txt: holds no problem"),
        (b"\xef\xbb\xbf# nothing\r\n\r\n", "s.txt: holds no problem"),
        (b"\x7fELF\x02\x01\x01\0\0\0", "s.txt:1: holds a NUL byte"),
        (b"dense m=1 n=8 k=16\n# caf\xe9\n", "s.txt:2: not UTF-8"),
        ("dense m=1 n=8 k=16".encode("utf-16"), "is UTF-16: save it as UTF-8"),
        (b"# " + b"x" * 2**24, "not a shapes file"),
    ],
)
def test_files_that_are_no_shapes(tmp_path: Path, data: bytes, part: str) -> None:
    assert part in refusal(write(tmp_path, "s.txt", data))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.txt").startswith(f"{tmp_path / 'none.txt'}: no such file")
    assert "deepseek_v3" in refusal(tmp_path / "none.txt")
    assert refusal(tmp_path) == f"{tmp_path}: is a folder; expected a shapes file"
    assert "can not be read" in refusal(tmp_path / "a\0b")
    assert "can not be read" in refusal(tmp_path / ("x" * 5000))


def test_a_file_that_stands_for_too_much(tmp_path: Path) -> None:
    line = "dense m=1..50000+1 n=8 k={}\n"
    path = write(tmp_path, "s.txt", "".join(line.format(16 * i) for i in (1, 2, 3, 4)))
    assert refusal(path) == f"{path}:3: more than 100000 problems up to here: split the file"


# The shipped file.


def test_the_shipped_problems() -> None:
    found = load_shapes("deepseek_v3")
    assert found == load_shapes(shipped_shapes()["deepseek_v3"])
    assert found.notes == []
    sizes = {(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)}
    expected = {(m, *nk) for m in (1, 16, 64, 128, 512, 4096) for nk in {*sizes, (576, 7168)}}
    assert len(found.lines) == 42
    assert {(x.problem.m, x.problem.n, x.problem.k) for x in found.lines} == expected


def test_a_file_at_hand_comes_before_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(load_shapes("deepseek_v3.txt").lines) == 42
    write(tmp_path, "deepseek_v3.txt", "dense m=1 n=8 k=16")
    assert len(load_shapes("deepseek_v3.txt").lines) == 1
    assert "no such file" in refusal(Path("other/deepseek_v3.txt"))
