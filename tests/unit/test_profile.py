"""kgen profile with an Nsight Compute made up: it runs the target for real, and prints CSV.

The CSV has the form that ncu's manual describes; what a real one prints is for the GPU tests.
"""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from kgen.build import Cubin
from kgen.cli import profile as profile_command
from kgen.cli.arguments import device_at_hand
from kgen.cli.main import main
from kgen.config import GemmConfig
from kgen.device import H200
from kgen.errors import GpuMissing, KgenError
from kgen.problem import GemmProblem
from kgen.search.profile import Metric, find_ncu, leading_stalls, parse, profile
from tests.unit.fake_search import GPU, NO_GPU, FakeBuilder

PROBLEM = GemmProblem("dense", 64, 2112, 7168)
CONFIG = GemmConfig(block_n=96)
CUBIN: Cubin = FakeBuilder().build(PROBLEM, CONFIG)
KERNEL = "kgen_dense_block_to_bf16_128x96_s4_w2"
HEAD = (
    '"ID","Process ID","Process Name","Kernel Name","Section Name","Metric Name","Metric Unit",'
    '"Metric Value"'
)
LIGHT = "GPU Speed Of Light Throughput"
ROWS = [
    (LIGHT, "Duration", "ns", "8,750"),
    (LIGHT, "DRAM Throughput", "%", "61.25"),
    ("Compute Workload Analysis", "sm__inst_executed_pipe_tensor.sum", "inst", "12"),
    ("Launch Statistics", "Cluster Scheduling Policy", "", "PolicySpread"),
    *(
        (
            "Warp State Statistics",
            f"smsp__average_warps_issue_stalled_{name}_per_warp_active.pct",
            "%",
            value,
        )
        for name, value in (("wait", "3.5"), ("long_scoreboard", "41.0"), ("barrier", "12.25"))
    ),
]
CSV = "\n".join(
    ["==PROF== Connected to process 7", HEAD]
    + [",".join(f'"{text}"' for text in ("0", "7", "python", KERNEL, *row)) for row in ROWS]
)


def fake_ncu(folder: Path, body: str) -> str:
    """A program that gets ncu's arguments as `args`, those of its target as `target`."""
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nargs = sys.argv[1:]\n"
        f"target = args[args.index({sys.executable!r}):]\n{body}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


RUNS = f"code = subprocess.run(target).returncode\nprint({CSV!r} if not code else 'no kernels')\n"


@pytest.fixture
def ncu(tmp_path: Path) -> str:
    return fake_ncu(tmp_path, RUNS)


def run(ncu: str, backend: str = GPU, timeout_s: float = 60.0, **fake_gpu: Any) -> Any:
    return profile(
        PROBLEM, CUBIN, ncu, backend=backend, backend_options=fake_gpu, timeout_s=timeout_s
    )


def test_the_kernel_is_verified_and_one_launch_is_in_the_range(ncu: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    found = run(ncu, journal=str(journal))
    assert journal.read_text().splitlines() == [
        f"open {PROBLEM}",
        f"verify {CONFIG}",
        f"launch {CONFIG} in kgen warm-up",
        f"launch {CONFIG} in kgen profile",
    ]
    assert found.kernel == KERNEL
    assert [(m.section, m.name, m.unit, m.text) for m in found.metrics] == ROWS
    assert [m.value for m in found.metrics] == [8750.0, 61.25, 12.0, None, 3.5, 41.0, 12.25]
    assert [m.name for m in found.metrics if m.is_dram] == ["DRAM Throughput"]
    assert [m.text for m in found.metrics if m.is_tensor] == ["12"]
    stalls = leading_stalls(found.metrics, 2)
    assert [(m.stall, m.value) for m in stalls] == [("long_scoreboard", 41.0), ("barrier", 12.25)]


def test_a_wrong_kernel_is_not_profiled(ncu: str) -> None:
    with pytest.raises(KgenError, match="was not profiled: WrongResult: tile"):
        run(ncu, behaviours={str(CONFIG): "wrong"})


def test_a_machine_without_a_gpu(ncu: str) -> None:
    with pytest.raises(GpuMissing, match="no CUDA driver on this machine"):
        run(ncu, backend=NO_GPU)


def test_counters_that_may_not_be_read(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, "print('==ERROR== ERR_NVGPUCTRPERM - no permission'); sys.exit(1)")
    with pytest.raises(KgenError, match=r"may not read .*RestrictProfiling.*SYS_ADMIN"):
        run(ncu)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "print('==WARNING== No kernels were profiled.')",
            r"profiled nothing \(exit code 0\).*No k",
        ),
        ("sys.exit('unknown option')", r"profiled nothing \(exit code 1\): unknown option"),
        ("import time; time.sleep(60)", "no result after 1 s, given up"),
    ],
)
def test_what_else_goes_wrong(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(KgenError, match=message):
        run(fake_ncu(tmp_path, body), timeout_s=1.0)


def test_arguments(tmp_path: Path) -> None:
    ncu = fake_ncu(
        tmp_path, f"print({CSV!r}); open({str(tmp_path / 'args')!r}, 'w').write(repr(args))"
    )
    profile(PROBLEM, CUBIN, ncu, export=tmp_path / "report")
    words = eval((tmp_path / "args").read_text())
    assert words[words.index("--nvtx-include") + 1] == "kgen profile/"
    assert words[words.index("--export") + 1] == str(tmp_path / "report")
    assert words[words.index("--clock-control") + 1] == "none"
    assert words.count("--section") == 7


@pytest.mark.parametrize(
    "name",
    [
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
        "smsp__average_warp_latency_issue_stalled_long_scoreboard.ratio",
        "smsp__average_warps_issue_stalled_long_scoreboard_not_issued_per_warp_active.pct",
        "smsp__average_warps_issue_stalled_long_scoreboard_per_warp_active.pct",
    ],
)
def test_reasons_for_stalls_whatever_they_are_counted_by(name: str) -> None:
    assert Metric("Warp State Statistics", name, "", "1.0").stall == "long_scoreboard"
    assert Metric("", "Stall Long Scoreboard", "", "1.0").stall == "Long Scoreboard"
    assert Metric("", "Issued Warp Per Scheduler", "", "1.0").stall == ""


def test_text_without_a_table() -> None:
    assert parse("") is None
    assert parse("==PROF== nothing\n") is None
    assert parse(HEAD) is None


def test_ncu_is_looked_for(ncu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kgen.search.profile.INSTALLED", (f"{tmp_path}/none/*/ncu",))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(KgenError, match=r"no Nsight Compute \(ncu\) found on PATH, /cuda/bin"):
        find_ncu(cuda_home="/cuda")
    with pytest.raises(KgenError, match="--ncu /no/ncu: no such program"):
        find_ncu("/no/ncu")
    assert find_ncu(ncu) == ncu
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_ncu() == ncu
    for version in ("2025.1", "2025.3"):
        (tmp_path / "opt" / version).mkdir(parents=True)
        (tmp_path / "opt" / version / "ncu").touch()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr("kgen.search.profile.INSTALLED", (f"{tmp_path}/opt/*/ncu",))
    assert find_ncu() == str(tmp_path / "opt" / "2025.3" / "ncu")


# ---- the command


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, a compiler and a profile made up; the command's own work is real."""
    monkeypatch.setattr(profile_command, "device_at_hand", lambda: (H200, ""))
    monkeypatch.setattr("kgen.runtime.driver.driver_version", lambda: (13, 0))
    monkeypatch.setattr("kgen.search.builder.create", lambda settings, cuda: FakeBuilder())
    real = profile
    monkeypatch.setattr(
        "kgen.search.profile.profile",
        lambda problem, cubin, ncu, export: real(problem, cubin, ncu, export=export, backend=GPU),
    )


def test_command(
    with_gpu: None, ncu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", str(PROBLEM), "--ncu", ncu, "--cache", str(tmp_path / "cache")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == KERNEL
    assert "DRAM Throughput" in out
    assert "Cluster Scheduling" not in out
    assert out.index("long scoreboard") < out.index("barrier") < out.index("wait")
    assert main([*words, "--all"]) == 0
    assert "PolicySpread" in capsys.readouterr().out
    assert main([*words, "--json", "--set", "block_n=96"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kernel"], told["config"]["block_n"]) == (KERNEL, 96)
    assert [metric["stall"] for metric in told["metrics"][-3:]] == [
        "wait",
        "long_scoreboard",
        "barrier",
    ]
    assert main([*words, "-o", str(tmp_path / "no" / "x")]) == 2


def test_command_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if not device_at_hand()[1]:
        pytest.skip("there is a GPU here")
    assert main(["profile", str(PROBLEM)]) == 1
    assert "profile needs a Hopper GPU" in capsys.readouterr().err
