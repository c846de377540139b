"""`kgen shapes` and `kgen misses`: files made from a config, converted, checked and merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kgen.cli.main import main
from kgen.problem import GemmProblem
from kgen.runtime.record import add_to
from kgen.shape_writer import FORMS
from kgen.shapes import load_shapes
from tests.unit.test_model_shapes import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_70B

Capture = pytest.CaptureFixture[str]
P64 = GemmProblem("dense", 64, 2112, 7168)
P32 = GemmProblem("dense", 32, 2112, 7168)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DEEPSEEK_V3))
    return file


def test_a_shapes_file_from_a_config(config: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["shapes", "--from-config", str(config), "--tp", "8", "--ep", "16", "--tokens", "1,64"]
    assert main(words) == 0
    said = capsys.readouterr()
    rows = [row for row in said.out.splitlines() if not row.startswith("#")]
    assert rows[0] == "dense m=1,64 n=2112 k=7168 weight=61  # attention q_a and kv_a"
    assert all(" # " in row for row in rows)
    assert f"kgen shapes --from-config {config} --tp 8 --ep 16 --tokens 1,64" in said.out
    assert said.err == "kgen: 21 problems\n"
    (tmp_path / "made.txt").write_text(said.out)
    shapes = load_shapes(tmp_path / "made.txt")
    assert (len(shapes.lines), shapes.notes) == (21, [])


def test_without_tokens_the_default_ones(config: Path, capsys: Capture) -> None:
    assert main(["shapes", "--from-config", str(config.parent), "--lm-head", "fp32"]) == 0
    out = capsys.readouterr().out
    assert "m=1,16,64,128,256,512,1024,2048,4096 n=2112 k=7168" in out
    assert "n=129280 k=7168 d_dtype=fp32  " in out


@pytest.mark.parametrize("form", FORMS)
def test_forms_hold_the_same(form: str, config: Path, tmp_path: Path, capsys: Capture) -> None:
    made, plain = tmp_path / f"made.{form}", tmp_path / "plain.txt"
    words = ["shapes", "--from-config", str(config), "--tokens", "1,64"]
    assert main([*words, "-o", str(made)]) == 0
    assert main([*words, "-o", str(plain), "--format", "txt"]) == 0
    assert capsys.readouterr().out == ""
    pairs = [[(x.problem, x.weight) for x in load_shapes(p).lines] for p in (made, plain)]
    assert pairs[0] == pairs[1]
    assert main(["shapes", str(made), "--format", form]) == 0
    kept = [row for row in made.read_text().splitlines() if not row.startswith("#")]
    if form != "txt":  # there, rows that differ in comments alone become one
        assert capsys.readouterr().out.splitlines() == kept


def test_a_layer_that_is_left_out_is_said(config: Path, capsys: Capture) -> None:
    config.write_text(json.dumps(GPT_OSS_120B))
    assert main(["shapes", "--from-config", str(config), "--tp", "8"]) == 1
    said = capsys.readouterr()
    assert "kgen: expert down is left out: k=360" in said.err
    assert "# expert gate and up" in said.out


def test_converting_merges_and_checks(tmp_path: Path, capsys: Capture) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.csv"
    one.write_text("dense m=1,64 n=2112 k=7168  # said here\n")
    two.write_text("kind,m,n,k,weight\ndense,64,2112,7168,2.5\n")
    assert main(["shapes", str(one), str(two)]) == 0
    said = capsys.readouterr()
    assert said.out == "dense m=1 n=2112 k=7168\ndense m=64 n=2112 k=7168 weight=3.5\n"
    assert "tuned once, weights added" in said.err
    assert "kgen: 2 problems\n" in said.err
    one.write_text("dense m=1 n=2113 k=7168\n")
    assert main(["shapes", str(one)]) == 2
    assert f"{one}:1: n=2113" in capsys.readouterr().err
    assert main(["shapes", "deepseek_v3"]) == 0
    assert "kgen: 42 problems\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give shapes files, or --from-config"),
        (("deepseek_v3", "--from-config", "CONFIG"), "give shapes files, or --from-config"),
        (("deepseek_v3", "--tp", "8"), "--tp goes with --from-config"),
        (("deepseek_v3", "--lm-head", "none"), "--lm-head goes with --from-config"),
        (("--from-config", "CONFIG", "--tokens", "many"), "--tokens: m='many'"),
        (("--from-config", "CONFIG", "--tokens", "0"), "--tokens: m=0"),
        (("--from-config", "CONFIG", "--tokens", "1..20000+1"), "problems, at most 100000: fewer"),
        (
            ("--from-config", "CONFIG", "--tp", "7"),
            "num_attention_heads=128 is not a multiple of 7",
        ),
        (("--from-config", "CONFIG", "--tp", "8", "--ep", "12"), "multiple of the other"),
        (("--from-config", "nothing.json"), "error: nothing.json: can not be read: No such file"),
        (("nothing.txt",), "nothing.txt: no such file"),
    ],
)
def test_wrong_usage(words: tuple[str, ...], said: str, config: Path, capsys: Capture) -> None:
    assert main(["shapes", *(str(config) if word == "CONFIG" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_config_with_fields_missing_names_its_file(config: Path, capsys: Capture) -> None:
    config.write_text(json.dumps(LLAMA_70B | {"hidden_size": None}))
    assert main(["shapes", "--from-config", str(config)]) == 2
    assert f"{config}: the config can not be used: hidden_size" in capsys.readouterr().err


def test_an_output_that_can_not_be_written(config: Path, capsys: Capture) -> None:
    target = f"{config}/below/a/file.txt"
    assert main(["shapes", "deepseek_v3", "-o", target]) == 1
    assert f"{target} can not be written: Not a directory" in capsys.readouterr().err


# ---- misses


def test_misses_of_several_processes_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("KGEN_MISSES", str(tmp_path / "misses-{pid}.txt"))
    add_to(tmp_path / "misses-7.txt", {P64: 3, P32: 1})
    add_to(tmp_path / "misses-8.txt", {P32: 4})
    assert main(["misses"]) == 0
    assert capsys.readouterr().out == f"{P32} weight=5\n{P64} weight=3\n"
    assert main(["misses", str(tmp_path / "misses-7.txt"), "--format", "csv"]) == 0
    out = capsys.readouterr().out
    assert out == "kind,m,n,k,weight\ndense,64,2112,7168,3\ndense,32,2112,7168,1\n"


def test_no_misses_and_no_place_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("KGEN_MISSES", str(tmp_path / "none.txt"))
    assert main(["misses"]) == 0
    said = capsys.readouterr()
    assert (said.out, "nothing was recorded" in said.err) == ("", True)
    assert "no Hopper GPU" in said.err
    monkeypatch.delenv("KGEN_MISSES")
    assert main(["misses"]) == 2
    assert "set KGEN_MISSES" in capsys.readouterr().err
    assert main(["misses", str(tmp_path / "none.txt")]) == 2
    assert "no such file" in capsys.readouterr().err
