"""The public grouped calls: results on the CPU, what is refused, KGEN_CHECK, and the kernel path on
a driver made of callbacks."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kgen.config import GemmConfig
from kgen.errors import LaunchError, UnsupportedInput, UsageError
from kgen.problem import GemmProblem
from kgen.runtime import gemm, grouped
from kgen.runtime.grouped_operands import GroupedInputs
from kgen.runtime.lookup import Winner
from tests.unit.test_dispatch import World
from tests.unit.test_dispatch import world as world  # noqa: PLC0414, a fixture

E4M3 = torch.float8_e4m3fn
G, M, N, K = 3, 384, 72, 272
TUNED = GemmConfig(block_m=64, block_n=48, num_stages=4, num_math_warpgroups=1)


@pytest.fixture(autouse=True)
def _settings_anew() -> Iterator[None]:
    grouped.forget()
    yield
    grouped.forget()


def operands(k: int = K, n: int = N, masked: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    a, sfa = gemm.per_token_cast_to_fp8(
        torch.randn(M, k, generator=generator), row_major_scales=True
    )
    weights = [gemm.per_block_cast_to_fp8(torch.randn(n, k, generator=generator)) for _ in range(G)]
    b = torch.stack([w.view(torch.uint8) for w, _ in weights]).view(E4M3)
    t = {
        "a": a,
        "sfa": sfa,
        "b": b,
        "sfb": torch.stack([s for _, s in weights]),
        "out": torch.full((M, n), 7.0, dtype=torch.bfloat16),
    }
    if masked:
        t["a"] = a.view(torch.uint8).view(G, M // G, k).view(E4M3)
        t["sfa"], t["out"] = sfa.view(G, M // G, -1), t["out"].view(G, M // G, n)
    return t


def run(t: dict[str, Any], **layout: Any) -> torch.Tensor:
    pairs = (t["a"], t["sfa"]), (t["b"], t["sfb"])
    if "masked_m" in layout:
        gemm.m_grouped_gemm_fp8_fp8_bf16_nt_masked(*pairs, t["out"], **layout)
    else:
        gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(*pairs, t["out"], **layout)
    out: torch.Tensor = t["out"]
    return out


def dense(t: dict[str, Any], group: int) -> torch.Tensor:
    """Every row times one group's weights, by the dense call."""
    out = torch.empty(M, t["b"].shape[1], dtype=torch.bfloat16)
    a = t["a"].view(torch.uint8).reshape(M, -1).view(E4M3)
    rows = (a, t["sfa"].reshape(M, -1))
    gemm.gemm_fp8_nt(rows, (t["b"][group], t["sfb"][group]), out)
    return out


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_indices_with_holes() -> None:
    t = operands()
    index = torch.full((M,), -1, dtype=torch.int32)
    index[3:100], index[128:256], index[300:310] = 2, 0, 1
    index[50] = -1
    out = run(t, m_indices=index)
    for group in range(G):
        assert torch.equal(out[index == group], dense(t, group)[index == group])
    assert bool((out[index < 0] == 7).all())
    assert gemm.last_path() == "reference"


def test_offsets_of_any_size() -> None:
    t = operands()
    out = run(t, m_offsets=int32(0, 101, 101, 230))
    assert torch.equal(out[:101], dense(t, 0)[:101])
    assert torch.equal(out[101:230], dense(t, 2)[101:230])
    assert bool((out[230:] == 7).all())


def test_counts() -> None:
    t = operands(masked=True)
    out = run(t, masked_m=int32(0, 5, 128), expected_m=64)
    assert bool((out[0] == 7).all())
    assert bool((out[1, 5:] == 7).all())
    assert torch.equal(out[1, :5], dense(t, 1)[128:133])
    assert torch.equal(out[2], dense(t, 2)[256:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_outputs_under_the_neutral_names(dtype: torch.dtype) -> None:
    t = operands()
    pairs = (t["a"], t["sfa"]), (t["b"], t["sfb"])
    out = torch.full((M, N), 7.0, dtype=dtype)
    gemm.m_grouped_gemm_fp8_nt_contiguous(*pairs, out, m_offsets=int32(0, 0, 10, 20))
    assert bool((out[20:] == 7).all())
    assert torch.allclose(out[:10].float(), dense(t, 1)[:10].float(), rtol=1e-2, atol=1e-2)
    with pytest.raises(
        UnsupportedInput, match=r"writes torch\.bfloat16; m_grouped_gemm_fp8_nt_con"
    ):
        gemm.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(*pairs, out, m_offsets=int32(0, 0, 1, 2))


def test_what_ignored_rows_hold_has_no_influence() -> None:
    t, clean = operands(), operands()
    index = torch.full((M,), -1, dtype=torch.int32)
    index[:60], index[256:] = 1, 0
    t["a"].view(torch.uint8)[index < 0] = 0x7F
    t["sfa"][index < 0] = torch.nan
    assert torch.equal(run(t, m_indices=index), run(clean, m_indices=index))


def test_no_rows_no_groups_no_columns() -> None:
    t = operands()
    t |= {name: t[name][:0] for name in ("a", "sfa", "out")}
    run(t, m_indices=int32())
    assert gemm.last_path() == "empty"
    t = operands()
    t |= {name: t[name][:0] for name in ("b", "sfb")}
    assert bool((run(t, m_offsets=int32(0)) == 7).all())


def test_the_alignment_is_told() -> None:
    assert gemm.get_m_alignment_for_contiguous_layout() == 128


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update(a=t["a"].float()), r"a is float32\[384, 272\].*expected float8_e4m3fn"),
        (lambda t: t.update(b=t["b"][0]), r"b is .*expected \[G, N, K\]"),
        (lambda t: t.update(sfb=t["sfb"][:, :0]), r"b_scales is .*\[G, ceil\(N/128\)"),
        (lambda t: t.update(sfa=t["sfa"][1:]), r"a_scales is .*expected \[M, ceil\(K/128\)\]"),
        (lambda t: t.update(out=t["out"].t()), r"out is .*expected \[M, N\] = \[384, 72\]"),
        (lambda t: t.update(layout=int32(0, 1)), r"m_offsets is int32\[2\].*expected \[G\+1\]"),
        (lambda t: t.update(layout=torch.zeros(4)), r"m_offsets is float32.*expected int32"),
        (lambda t: t.update(layout=[0, 1, 2, 3]), "m_offsets is a list: expected a torch.Tensor"),
        (lambda t: t.update(layout=torch.zeros(8, dtype=torch.int32)[::2]), "2 elements apart"),
        (lambda t: t.update(a=t["a"][:, ::2]), "a is .*: expected|columns 2 elements apart"),
        (
            lambda t: t.update(out=t["out"].t().contiguous().t()),
            "out is .*columns 384 elements apart; allocate it as torch.empty does",
        ),
        (lambda t: t.update(out=t["out"].expand(384, 72)[:, :72]), None),
    ],
)
def test_what_does_not_fit_is_named(change: Callable[[Any], None], words: str | None) -> None:
    t = operands() | {"layout": int32(0, 1, 2, 3)}
    change(t)
    if words is None:
        run(t, m_offsets=t["layout"])
        return
    with pytest.raises(UnsupportedInput, match=words):
        run(t, m_offsets=t["layout"])


def test_sizes_that_kernels_have_not() -> None:
    with pytest.raises(UnsupportedInput, match="N=68: expected a multiple of 8; pad B to 72"):
        run(operands(n=68), m_offsets=int32(0, 1, 2, 3))
    with pytest.raises(UnsupportedInput, match="K=264: expected a multiple of 16"):
        run(operands(k=264), m_offsets=int32(0, 1, 2, 3))


def test_outputs_of_their_own() -> None:
    t = operands()
    memory = torch.zeros(M * N * 2 + M * K, dtype=torch.uint8)
    t["a"] = memory[: M * K].view(M, K).view(E4M3)
    t["out"] = memory[: M * N * 2].view(torch.bfloat16).view(M, N)
    with pytest.raises(UnsupportedInput, match="out shares memory with a"):
        run(t, m_offsets=int32(0, 1, 2, 3))


def test_one_layout_exactly() -> None:
    t = operands()
    with pytest.raises(UnsupportedInput, match="given neither"):
        run(t)
    with pytest.raises(UnsupportedInput, match="given m_indices and m_offsets"):
        run(t, m_indices=int32(*[0] * M), m_offsets=int32(0, 1, 2, 3))
    with pytest.raises(UnsupportedInput, match=r"expected_m=-1"):
        run(operands(masked=True), masked_m=int32(1, 2, 3), expected_m=-1)
    with pytest.raises(UnsupportedInput, match="expected the pair"):
        gemm.m_grouped_gemm_fp8_nt_masked(t["a"], t["b"], t["out"], int32(1), 1)


def test_no_gradient() -> None:
    t = operands()
    t["sfa"].requires_grad_()
    with pytest.raises(UnsupportedInput, match="m_grouped_gemm_fp8_nt_contiguous has no gradient"):
        run(t, m_offsets=int32(0, 1, 2, 3))
    with torch.no_grad():
        run(t, m_offsets=int32(0, 1, 2, 3))


BAD_LAYOUTS = [
    ({"m_offsets": int32(1, 2, 3, 4)}, r"m_offsets\[0\] is 1: expected 0"),
    ({"m_offsets": int32(0, 9, 8, 10)}, r"m_offsets\[2\] is 8, below m_offsets\[1\] = 9"),
    ({"m_offsets": int32(0, 9, 9, 385)}, r"m_offsets\[3\] is 385: expected at most the 384"),
    ({"m_indices": int32(*[0] * 383, 3)}, r"m_indices\[383\] is 3: expected a group from 0 to 2"),
    ({"m_indices": int32(*[-2] * 384)}, r"m_indices\[0\] is -2"),
    ({"m_indices": int32(*[0] * 100, *[1] * 284)}, r"m_indices\[0:128\] has rows of the groups 0"),
    ({"masked_m": int32(0, 129, 1), "expected_m": 1}, r"masked_m\[1\] is 129: expected 0 to 128"),
    ({"masked_m": int32(0, 1, -1), "expected_m": 1}, r"masked_m\[2\] is -1"),
]


@pytest.mark.parametrize(("layout", "words"), BAD_LAYOUTS)
def test_values_are_looked_at_where_asked(
    layout: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = operands(masked="masked_m" in layout)
    monkeypatch.setenv("KGEN_CHECK", "1")
    with pytest.raises(UnsupportedInput, match=words):
        run(t, **layout)
    monkeypatch.setenv("KGEN_CHECK", "0")
    grouped.forget()
    run(t, **layout)


def test_good_values_pass_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGEN_CHECK", "1")
    run(operands(), m_offsets=int32(0, 0, 384, 384))
    run(operands(), m_indices=int32(*[2] * 127, -1, *[-1] * 128, *[0] * 128))
    run(operands(masked=True), masked_m=int32(0, 128, 3), expected_m=0)
    monkeypatch.setenv("KGEN_CHECK", "yes")
    grouped.forget()
    with pytest.raises(UsageError, match="KGEN_CHECK='yes': expected 0 or 1"):
        run(operands(), m_offsets=int32(0, 0, 384, 384))


def test_compiled_whole() -> None:
    t = operands()
    offsets = int32(0, 100, 100, 200)

    def step(lhs: Any, rhs: Any, out: Any, layout: Any) -> torch.Tensor:
        gemm.m_grouped_gemm_fp8_nt_contiguous(lhs, rhs, out, m_offsets=layout)
        more: torch.Tensor = out + 1
        return more

    compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=True)
    found = compiled((t["a"], t["sfa"]), (t["b"], t["sfb"]), t["out"], offsets)
    assert torch.equal(found, run(operands(), m_offsets=offsets) + 1)
    t = operands(masked=True)

    def other(lhs: Any, rhs: Any, out: Any, layout: Any) -> torch.Tensor:
        gemm.m_grouped_gemm_fp8_nt_masked(lhs, rhs, out, layout, 64)
        more: torch.Tensor = out + 1
        return more

    compiled = torch.compile(other, fullgraph=True, backend="eager")
    counts = int32(3, 0, 128)
    found = compiled((t["a"], t["sfa"]), (t["b"], t["sfb"]), t["out"], counts)
    assert torch.equal(found, run(operands(masked=True), masked_m=counts, expected_m=64) + 1)


def test_operators_are_well_formed() -> None:
    t = operands()
    arguments = (t["a"], t["sfa"], t["b"], t["sfb"], t["out"])
    operator = torch.ops.kgen.m_grouped_gemm_fp8_nt_contiguous.default
    tests = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, (*arguments, None, int32(0, 1, 2, 3)), test_utils=tests)


# ---------------------------------------------------------------- the kernel path


def column_major(t: dict[str, Any]) -> dict[str, Any]:
    return t | {"sfa": gemm.get_col_major_tma_aligned_tensor(t["sfa"])}


def test_a_tuned_problem_runs_on_its_winner(world: World) -> None:
    family = GemmProblem("contiguous", 1, N, K, groups=G)
    world.winners[family] = (Winner(M // G, TUNED, f"key of {TUNED}"),)
    t, offsets = column_major(operands()), int32(0, 100, 100, 200)
    run(t, m_offsets=offsets)
    assert world.builder.built == [TUNED]
    assert gemm.last_path() == "kernel"
    run(t, m_offsets=offsets)
    assert len(world.fake.launches) == 2
    assert len(world.fake.maps) == 4, "the second call was prepared"
    assert gemm.stats()["prepared"] == 1
    offsets.fill_(0)  # read on the device: the launch stays right
    run(t, m_offsets=offsets)
    assert len(world.fake.maps) == 4
    run(t, m_offsets=offsets.clone())
    assert len(world.fake.maps) == 8


def test_indices_and_offsets_are_told_apart(world: World) -> None:
    t = column_major(operands())
    run(t, m_indices=int32(*[0] * M))
    run(t, m_offsets=int32(0, 1, 2, 3))
    kept = list(grouped._prepared.values())
    assert [struct.unpack_from("<II", x.launch.args, 672) for x in kept] == [(G, 1), (G, 0)]


@pytest.mark.parametrize(("expected_m", "m"), [(0, 1), (64, 64), (4096, 128)])
def test_expected_m_names_the_problem(expected_m: int, m: int, world: World) -> None:
    t = column_major(operands(masked=True))
    run(t, masked_m=int32(1, 2, 3), expected_m=expected_m)
    assert gemm.missed_shapes()[0].startswith(f"masked m={m} n={N} k={K} groups={G}")
    assert gemm.last_path() == "kernel"


def test_row_major_scales_of_many_rows_are_turned(world: World) -> None:
    run(operands(), m_offsets=int32(0, 1, 2, 3))
    assert len(world.fake.maps) == 4, "one of them for the turned scales"
    assert not grouped._prepared
    assert gemm.stats()["copies"] == {"a_scales: row-major": 1}


def test_checks_are_made_at_each_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KGEN_CHECK", "1")
    t, offsets = column_major(operands()), int32(0, 1, 2, 3)
    run(t, m_offsets=offsets)
    offsets[0] = 5
    with pytest.raises(UnsupportedInput, match=r"m_offsets\[0\] is 5"):
        run(t, m_offsets=offsets)


def test_a_first_call_in_a_capture_is_refused(world: World) -> None:
    world.capturing = True
    says = rf'warm_up\(m={M // G}, n={N}, k={K}, kind="contiguous", groups={G}, ...\)'
    with pytest.raises(LaunchError, match=f"run the same call once, or .*{says}"):
        run(column_major(operands()), m_offsets=int32(0, 1, 2, 3))


@pytest.mark.parametrize(("kind", "m"), [("contiguous", M // G), ("masked", 64)])
def test_warm_calls_build_nothing(kind: str, m: int, world: World) -> None:
    gemm.warm_up([m, 2 * m], N, K, kind=kind, groups=G)
    built = list(world.builder.built)
    assert built
    world.capturing = True
    t = column_major(operands(masked=kind == "masked"))
    if kind == "masked":
        run(t, masked_m=int32(1, 2, 3), expected_m=m)
    else:
        run(t, m_offsets=int32(0, 1, 2, 3))
    assert gemm.last_path() == "kernel"
    assert world.builder.built == built


def test_plans_of_grouped_calls(world: World) -> None:
    """As a call with these sizes would be answered, under the budget of SMs."""
    family = GemmProblem("contiguous", 1, N, K, groups=G)
    world.winners[family] = (Winner(M // G, TUNED, f"key of {TUNED}"),)
    plan = gemm.plan_for(M // G, N, K, kind="contiguous", groups=G)
    assert plan is not None
    assert plan.choice is not None
    assert (plan.choice.config, plan.choice.origin) == (TUNED, "tuned")
    gemm.set_num_sms(20)
    budgeted = gemm.plan_for(M // G, N, K, kind="contiguous", groups=G)
    assert budgeted is not None
    assert "num_sms=20" in gemm.missed_shapes()[0]
    assert gemm.plan_for(0, N, K, kind="masked", groups=G) is None
    assert gemm.plan_for(5, N, K, device="cpu", kind="masked", groups=G) is not None, "made up"


def test_plans_of_weight_gradients(world: World) -> None:
    """With what a shapes line of the kind may leave out, or the call's own choice."""
    for kind, groups in (("wgrad", 1), ("k_grouped", G)):
        options: dict[str, Any] = {"kind": kind, "groups": groups, "out_dtype": torch.float32}
        choices: tuple[dict[str, Any], ...] = ({}, {"accumulate": False})
        for choice in choices:
            plan = gemm.plan_for(128, 256, 512, **options, **choice)
            assert plan is not None
            assert plan.choice is not None, plan.reason
    assert [line.split()[0] for line in gemm.missed_shapes()] == ["wgrad"] * 2 + ["k_grouped"] * 2
    with pytest.raises(UsageError):
        gemm.plan_for(128, 256, 512, kind="wgrad", device="cpu")


def test_plans_that_no_call_can_have() -> None:
    for wrong, says in (
        ({"kind": "diagonal"}, "kind='diagonal': expected one of"),
        ({"kind": "masked", "recipe": "row"}, "a grouped kind takes recipe=block"),
        ({"groups": 3}, "groups=3: a dense problem has one group"),
    ):
        with pytest.raises(UsageError, match=says):
            gemm.plan_for(64, N, K, device="cpu", **wrong)
    with pytest.raises(UsageError, match="n=68: the kernel needs a multiple of 8"):
        gemm.warm_up(64, 68, K, device="cpu", kind="masked", groups=G)
    assert gemm.plan_for(64, N, K, device="cpu", kind="masked", groups=G) is None


def test_a_budget_of_sms_is_part_of_the_problem(world: World) -> None:
    gemm.set_num_sms(20)
    t = column_major(operands(masked=True))
    run(t, masked_m=int32(1, 2, 3), expected_m=8)
    assert world.fake.launches[-1].grid[0] <= 20
    assert "num_sms=20" in gemm.missed_shapes()[0]


def test_the_reference_answers_where_no_kernel_can(world: World) -> None:
    world.builder.all_bad = True
    t = column_major(operands())
    with pytest.warns(gemm.KgenWarning, match="slow reference"):
        out = run(t, m_offsets=int32(0, 100, 100, 200))
    assert torch.equal(out[100:200], dense(operands(), 2)[100:200])
    assert gemm.last_path() == "reference"


def test_inputs_name_their_problem() -> None:
    t = operands()
    layout = int32(0, 1, 2, 3)
    x = GroupedInputs(t["a"], t["sfa"], t["b"], t["sfb"], t["out"], layout, "m_offsets")
    assert str(x.problem(0)) == f"contiguous m={M // G} n={N} k={K} groups={G}"
