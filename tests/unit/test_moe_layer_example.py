"""examples/moe_layer.py on a CPU: both layers agree with FP32 as their formats let them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from examples import moe_layer
from kgen.runtime import moe

SMALL = ["--counts", "5,0,130,17,16", "--hidden", "256", "--intermediate", "192"]


@pytest.fixture(scope="module")
def report() -> Any:
    return moe_layer.compare([5, 0, 130, 17, 16], 256, 192, 1, torch.device("cpu"))


@pytest.mark.parametrize("name", ["y", "x", "topk_weights", "gate_up", "down"])
def test_errors_are_those_of_the_formats(name: str, report: Any) -> None:
    """A wrong row, scale or weight would show as an error of a tenth or more."""
    assert 0 < report["pytorch_bf16"]["errors"][name] < 0.02
    assert 0.001 < report["kgen_fp8"]["errors"][name] < 0.08


def test_two_experts_of_each_token(capsys: pytest.CaptureFixture[str]) -> None:
    counts = ["--counts", "40,12,31,45", "--hidden", "128", "--intermediate", "64"]
    assert moe_layer.main([*counts, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "answered by reference" in out
    assert "error of the gradient of gate_up" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert moe_layer.main([*SMALL, "--top-k", "1", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kgen_fp8"]["weights_bytes"] > 2 * 5 * 3 * 192 * 256
    assert report["kgen_fp8"]["step_bytes"] is None
    assert report["kgen_fp8"]["backward_ms"] > 0


def test_counts_that_no_choice_can_have() -> None:
    with pytest.raises(SystemExit, match="a sum that top_k divides"):
        moe_layer.main([*SMALL, "--top-k", "2", "--device", "cpu"])


def test_choices_are_as_counted() -> None:
    layer = moe_layer.make_layer(moe_layer.COUNTS, 128, 64, 2, torch.device("cpu"))
    routing = moe.route_tokens(layer.topk_ids, 8)
    assert tuple(routing.counts.tolist()) == moe_layer.COUNTS
    assert bool((layer.topk_ids[:, 0] != layer.topk_ids[:, 1]).all())
