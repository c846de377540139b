"""kgen.runtime.gemm where there is no GPU: right results by the reference, hostile inputs refused
by name, and an import that touches nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kgen.runtime.gemm as g
from kgen.errors import UnsupportedInput, UsageError
from kgen.reference import gemm_reference
from kgen.runtime.operands import share_memory

M, N, K = 20, 264, 272  # three blocks of K, the last one partial; three of N
SQUARE = 256


def operands(m: int = M, n: int = N, k: int = K) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    a, sfa = g.per_token_cast_to_fp8(torch.randn(m, k, generator=generator))
    b, sfb = g.per_block_cast_to_fp8(torch.randn(n, k, generator=generator))
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    return {"a": a, "a_scales": sfa, "b": b, "b_scales": sfb, "out": out}


def run(t: dict[str, Any]) -> torch.Tensor:
    g.gemm_fp8_nt((t["a"], t["a_scales"]), (t["b"], t["b_scales"]), t["out"])
    out: torch.Tensor = t["out"]
    return out


def expected(t: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return gemm_reference(t["a"], t["a_scales"], t["b"], t["b_scales"], dtype)


def test_the_public_call_gives_the_reference() -> None:
    t = operands()
    g.gemm_fp8_fp8_bf16_nt((t["a"], t["a_scales"]), (t["b"], t["b_scales"]), t["out"])
    assert torch.equal(t["out"], expected(t))
    assert g.last_path() == "reference"
    assert g.stats()["fallbacks"] == {}  # by design here, so neither counted nor warned about


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_output_types(dtype: torch.dtype) -> None:
    t = operands()
    t["out"] = torch.zeros(M, N, dtype=dtype)
    assert torch.equal(run(t), expected(t, dtype))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (3, 7, 100), (130, 129, 129), (2, 1, 1)])
def test_sizes_that_no_kernel_takes(m: int, n: int, k: int) -> None:
    t = operands(m, n, k)
    assert torch.equal(run(t), expected(t))


def test_lists_do_as_pairs() -> None:
    t = operands()
    g.gemm_fp8_nt([t["a"], t["a_scales"]], [t["b"], t["b_scales"]], t["out"])  # type: ignore[arg-type]
    assert torch.equal(t["out"], expected(t))


def test_strided_views_are_read_and_written_where_they_are() -> None:
    t = operands()
    packed = expected(t)
    for name, pitch in (("a", 400), ("b", 401)):
        wide = torch.zeros(t[name].shape[0], pitch).to(torch.float8_e4m3fn)
        wide[:, 3 : 3 + K] = t[name]
        t[name] = wide[:, 3 : 3 + K]
    base = torch.full((M, 333), 7.0, dtype=torch.bfloat16)
    t["out"] = base[:, 5 : 5 + N]
    assert torch.equal(run(t), packed)
    assert (base[:, :5] == 7).all()
    assert (base[:, 5 + N :] == 7).all()


def scale_layouts(scales: torch.Tensor) -> dict[str, torch.Tensor]:
    m, blocks = scales.shape
    wide = torch.full((m, blocks + 3), -1.0)
    wide[:, 1 : 1 + blocks] = scales
    return {
        "row-major": scales.contiguous(),
        "column-major": scales.t().contiguous().t(),
        "aligned columns": g.get_col_major_tma_aligned_tensor(scales),
        "rows of a wider buffer": wide[:, 1 : 1 + blocks],
        "every second row": scales.repeat_interleave(2, 0)[::2],
    }


@pytest.mark.parametrize("name", ["a_scales", "b_scales"])
def test_scale_layouts_give_equal_results(name: str) -> None:
    t = operands()
    packed = expected(t)
    for layout, scales in scale_layouts(t[name]).items():
        assert torch.equal(scales, t[name])
        assert torch.equal(run({**t, name: scales}), packed), layout


def test_zero_scales_of_zero_blocks_give_zeros() -> None:
    t = operands()
    t["a"][3], t["a_scales"][3] = 0, 0.0
    out = run(t)
    assert not out[3].any()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(("m", "n"), [(0, N), (M, 0), (0, 0)])
def test_nothing_to_compute(m: int, n: int) -> None:
    t = operands(4, 8, K)
    t["a"], t["a_scales"] = torch.zeros(m, K).to(t["a"].dtype), torch.zeros(m, 3)
    t["b"], t["b_scales"] = torch.zeros(n, K).to(t["b"].dtype), torch.zeros(-(-n // 128), 3)
    t["out"] = torch.zeros(m, n, dtype=torch.bfloat16)
    run(t)
    assert g.last_path() == "empty"
    with pytest.raises(UnsupportedInput, match="b_scales"):
        run({**t, "b_scales": torch.zeros(7, 3)})


def test_no_columns_to_sum_gives_zeros() -> None:
    t = operands()
    t["a"], t["b"] = t["a"][:, :0], t["b"][:, :0]
    t["a_scales"], t["b_scales"] = t["a_scales"][:, :0], t["b_scales"][:, :0]
    assert not run(t).any()
    parameter = torch.nn.Parameter(torch.ones(M, N, dtype=torch.bfloat16))
    with torch.no_grad():
        assert not run({**t, "out": parameter}).any()


HOSTILE: dict[str, tuple[str, Any, str]] = {
    "a of another type": ("a", lambda x: x.float(), "a is float32.*per_token_cast_to_fp8"),
    "b of another type": ("b", lambda x: x.bfloat16(), "b is bfloat16.*per_block_cast_to_fp8"),
    "a in e4m3fnuz": ("a", lambda x: x.to(torch.float8_e4m3fnuz), "a is float8_e4m3fnuz.*e4m3fn"),
    "a as bytes": ("a", lambda x: x.view(torch.uint8), "a is uint8"),
    "scales in bf16": ("a_scales", lambda x: x.bfloat16(), "a_scales is bfloat16.*float32"),
    "scales packed": ("b_scales", lambda x: x.view(torch.int32), "b_scales is int32"),
    "scales in fp64": ("a_scales", lambda x: x.double(), "a_scales is float64"),
    "out in fp8": ("out", lambda x: x.to(torch.float8_e4m3fn), "out is float8.*bfloat16"),
    "flat": ("a", lambda x: x.flatten(), "a is .*expected two dimensions"),
    "batched": ("out", lambda x: x[None], "out is .*expected two dimensions"),
    "scales one column short": (
        "a_scales",
        lambda x: x[:, :-1],
        r"a_scales is float32\[20, 2\].*expected \[20, 3\], row-major with strides \(3, 1\) or",
    ),
    "scales one row long": ("b_scales", lambda x: x.repeat(2, 1)[:4], r"expected \[3, 3\]"),
    "scales transposed": (
        "a_scales",
        lambda x: x.t(),
        r"look transposed: pass a_scales.t\(\), which needs no copy",
    ),
    "scales of the other cast": (
        "a_scales",
        lambda x: x[:1],
        "look like those of per_block_cast_to_fp8: cast a with per_token_cast_to_fp8",
    ),
    "scales for each row of b": (
        "b_scales",
        lambda x: x.repeat_interleave(128, 0)[:N],
        "look like those of per_token_cast_to_fp8: cast b with per_block_cast_to_fp8",
    ),
    "scales expanded": (
        "a_scales",
        lambda x: torch.ones(1, 3).expand(M, 3),
        r"expanded over one value: pass a_scales.contiguous\(\)",
    ),
    "a expanded": ("a", lambda x: x[:1].expand(M, K), "a is .*expanded over one value"),
    "out expanded": ("out", lambda x: x[:1].expand(M, N), "out is .*expanded"),
    "b as [K, N]": ("b", lambda x: x.t(), r"looks like \[K, N\]: pass b.t\(\).contiguous\(\)"),
    "a as [K, M]": ("a", lambda x: x.t(), r"a looks like \[K, M\]: pass a.t\(\).contiguous\(\)"),
    "out transposed": ("out", lambda x: x.t().contiguous(), "looks transposed"),
    "out too wide": ("out", lambda x: torch.zeros(M, N + 8).bfloat16(), r"expected \[20, 264\]"),
    "out rows share memory": (
        "out",
        lambda x: torch.zeros(M * N).bfloat16().as_strided((M, N), (8, 1)),
        "its elements share memory",
    ),
    "not a tensor": ("out", lambda x: x.tolist(), "out is a list: expected a torch.Tensor"),
    "nothing": ("a_scales", lambda x: None, "a_scales is a NoneType"),
    "sparse": ("a_scales", lambda x: x.to_sparse(), "a_scales is torch.sparse_coo: expected plain"),
    "negated": ("b_scales", torch._neg_view, "b_scales is a negated view: expected"),
    "on meta": ("out", lambda x: x.to("meta"), "a on cpu.*out on meta: expected all tensors on"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_inputs_are_refused_by_name(case: str) -> None:
    name, change, says = HOSTILE[case]
    t = operands()
    out = t["out"]
    with pytest.raises(UnsupportedInput, match=says):
        run({**t, name: change(t[name])})
    assert torch.isnan(out).all(), "a refused call wrote its output"


def test_devices_that_no_path_serves() -> None:
    t = {name: tensor.to("meta") for name, tensor in operands().items()}
    with pytest.raises(UnsupportedInput, match="tensors on meta: expected a CPU or CUDA device"):
        run(t)


@pytest.mark.parametrize("pair", [None, torch.zeros(2, 16), (torch.zeros(1),), "ab"])
def test_what_is_not_a_pair_is_refused(pair: Any) -> None:
    t = operands()
    with pytest.raises(UnsupportedInput, match=r"expected the pair \(a, a_scales\), got"):
        g.gemm_fp8_nt(pair, (t["b"], t["b_scales"]), t["out"])
    with pytest.raises(UnsupportedInput, match=r"expected the pair \(b, b_scales\), got"):
        g.gemm_fp8_nt((t["a"], t["a_scales"]), pair, t["out"])


def test_the_bf16_name_writes_bf16_only() -> None:
    t = operands()
    with pytest.raises(UnsupportedInput, match="gemm_fp8_nt takes other outputs"):
        g.gemm_fp8_fp8_bf16_nt((t["a"], t["a_scales"]), (t["b"], t["b_scales"]), torch.zeros(M, N))


def test_ambiguous_squares_are_taken_as_they_are() -> None:
    t = operands(SQUARE, SQUARE, SQUARE)
    assert torch.equal(run(t), expected(t))
    turned = {**t, "b": t["b"].t(), "b_scales": t["b_scales"].t()}
    assert torch.equal(run(turned), expected(turned))


# ------------------------------------------------------------------------- overlap


def test_an_output_within_an_input_is_refused() -> None:
    t = operands(64, 64, 128)
    memory = t["a"].view(torch.uint8).flatten()
    t["out"] = memory.view(torch.bfloat16).as_strided((64, 64), (64, 1))
    with pytest.raises(UnsupportedInput, match="out shares memory with a:"):
        run(t)
    scales = torch.ones(200 * 64)
    t = {**operands(64, 64, 128), "a_scales": scales[100:164].view(64, 1)}
    t["out"] = scales[: 64 * 64].view(64, 64)
    with pytest.raises(UnsupportedInput, match="out shares memory with a_scales"):
        run(t)


def test_columns_of_one_buffer_do_not_overlap() -> None:
    buffer = torch.zeros(8, 32)
    left, right = buffer[:, :16], buffer[:, 16:]
    assert not share_memory(left, right)
    assert not share_memory(right, left)
    assert share_memory(left, buffer[:, 15:20])
    assert share_memory(buffer[:, 30:], buffer.flatten()[30:].as_strided((7, 4), (32, 1)))
    assert share_memory(left, buffer.t())
    assert not share_memory(buffer[:4], buffer[4:])
    assert not share_memory(buffer[:1], buffer[1:])
    assert not share_memory(left, right[:1])
    assert share_memory(left, buffer[3:4])


def test_scales_beside_the_output_in_one_workspace() -> None:
    t = operands(16, 64, 128)
    workspace = torch.zeros(16, 65)
    workspace[:, 64:] = t["a_scales"]
    t["a_scales"], t["out"] = workspace[:, 64:], workspace[:, :64]
    assert torch.equal(run(t), expected(t, torch.float32))


# --------------------------------------------------------------------- SMs, reports


def test_the_sm_budget_is_set_and_read() -> None:
    try:
        g.set_num_sms(20)
        assert g.get_num_sms() == 20
        for bad in (-1, 2.5, True, None):
            with pytest.raises(UsageError, match="num_sms"):
                g.set_num_sms(bad)  # type: ignore[arg-type]
        assert g.get_num_sms() == 20
    finally:
        g.set_num_sms(0)
    assert g.get_num_sms() == (0 if not torch.cuda.is_available() else g.get_num_sms())


def test_warming_up_where_there_is_no_gpu_does_nothing() -> None:
    g.warm_up([1, 64], 576, 512, device="cpu")
    assert g.plan_for(64, 576, 512, device="cpu") is None
    with pytest.raises(UnsupportedInput, match="out_dtype"):
        g.warm_up(64, 576, 512, torch.int32, "cpu")


def test_counters_start_at_zero() -> None:
    g.reset_stats()
    assert not any(g.stats().values())
    assert g.missed_shapes() == []


# ------------------------------------------------------------------------ import


def run_python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **options
    )


def test_import_is_light_reads_nothing_and_makes_no_context(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "import torch\n"
        "read = []\n"
        "class Environ(dict):\n"
        "    def get(self, key, default=None): read.append(key); return super().get(key, default)\n"
        "    def __getitem__(self, key): read.append(key); return super().__getitem__(key)\n"
        "os.environ = Environ(os.environ)\n"
        "import kgen.runtime.gemm as g\n"
        "heavy = {'sqlalchemy', 'jinja2', 'optuna', 'kgen.build', 'kgen.compiler', 'kgen.cache'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "ours = ('KGEN', 'CUDA', 'HOME', 'XDG')\n"
        "assert not [key for key in read if key.startswith(ours)], read\n"
        "assert not torch.cuda.is_initialized()\n"
        "from kgen.runtime import driver\n"
        "assert driver._api.cache_info().currsize == 0\n"
    )
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin", "KGEN_CACHE_DIR": str(tmp_path / "cache")}
    done = run_python(code, env=home, timeout=120)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("visible", ["", "-1", "1,0", "MIG-1234", "GPU-8ba8b4b1-d0c6"])
def test_any_visible_devices_and_no_home(visible: str) -> None:
    code = (
        "import torch, kgen.runtime.gemm as g\n"
        "a, sa = g.per_token_cast_to_fp8(torch.ones(3, 128))\n"
        "b, sb = g.per_block_cast_to_fp8(torch.ones(8, 128))\n"
        "out = torch.empty(3, 8, dtype=torch.bfloat16)\n"
        "g.gemm_fp8_fp8_bf16_nt((a, sa), (b, sb), out)\n"
        "assert (out == 128).all()\n"
    )
    done = run_python(code, env={"CUDA_VISIBLE_DEVICES": visible, "PATH": ""}, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_starts_clean() -> None:
    code = (
        "import os, torch, kgen.runtime.gemm as g\n"
        "from kgen.runtime import calls as c\n"
        "g._prepared[1] = 2; c.dispatchers[0] = 3; c.lock.acquire(); c.STATS._lock.acquire()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    ok = not g._prepared and not c.dispatchers and not c.lock.locked()\n"
        "    g.stats()\n"
        "    os._exit(0 if ok else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    done = run_python(code, timeout=120)
    assert done.returncode == 0, done.stderr
