"""Rendered sources: as kept, whole, and independent of what they must not depend on."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kgen.config import GemmConfig, resources
from kgen.errors import RenderError
from kgen.problem import GemmProblem
from kgen.render import _environment, render
from tools.golden import CASES, FOLDER, GROUPED_CASES, WGRAD_CASES, golden_sources

PROBLEM = GemmProblem("dense", 128, 2112, 7168)


@pytest.mark.parametrize("name", [f"{case}.cu" for case in (*CASES, *GROUPED_CASES, *WGRAD_CASES)])
def test_source_is_as_kept(name: str) -> None:
    assert (FOLDER / name).read_text() == golden_sources()[name], "see tools/golden.py --accept"


@pytest.mark.parametrize("config", [config for config, _ in CASES.values()])
def test_source_includes_nothing_and_states_its_configuration(config: GemmConfig) -> None:
    source = render(PROBLEM, config)
    assert "#include" not in source.text
    assert not re.search(r"\{% \w|\{\{ ", source.text), "a tag of the template language is left"
    head = source.text.split("\n\n")[0]
    for axis, value in config.to_dict().items():
        assert f"// {axis} = {value}" in head
    assert f"// Body SHA-256: {source.body_hash}" in head


def test_m_is_in_no_source_and_n_and_k_only_when_baked() -> None:
    other_m, other_n = PROBLEM.with_m(4096), replace(PROBLEM, n=7168, num_sms=20)
    free, baked = GemmConfig(), GemmConfig(baked_dims="nk")
    assert render(PROBLEM, free).text == render(other_m, free).text == render(other_n, free).text
    assert render(PROBLEM, baked).text == render(other_m, baked).text
    assert render(PROBLEM, baked).body_hash != render(other_n, baked).body_hash


def test_hash_is_that_of_the_body_and_not_of_the_comment() -> None:
    # The SASS pass comes after the compiler: it is named in the comment, the body stays the same.
    plain = render(PROBLEM, GemmConfig())
    patched = render(PROBLEM, GemmConfig(sass_pass="interleave"))
    assert plain.text != patched.text
    assert plain.body_hash == patched.body_hash


@pytest.mark.parametrize("block_n", range(16, 257, 8))
def test_wgmma_names_each_accumulator_register_once(block_n: int) -> None:
    text = render(PROBLEM, GemmConfig(block_m=64, num_math_warpgroups=1, block_n=block_n)).text
    body = text[text.index("wgmma.mma_async") : text.index("accumulate, 1, 1;")]
    operands = [int(number) for number in re.findall(r"%(\d+)", body)]
    assert operands == list(range(block_n // 2 + 2))
    assert text.count('"+f"(d[') == block_n // 2


def test_shared_memory_of_the_source_is_that_of_the_host() -> None:
    for config, p in [*CASES.values(), *WGRAD_CASES.values()]:
        text = render(p, config).text
        r = resources(config, p.d_dtype, p.recipe, p.bias, kind=p.kind)
        assert f"== {r.smem_bytes}, " in text


def test_a_name_that_a_template_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kgen.render.resources_of", lambda *_, **__: resources(GemmConfig()))
    monkeypatch.setattr("kgen.render.asdict", lambda _: {})
    with pytest.raises(RenderError, match="undefined"):
        render(PROBLEM, GemmConfig())
    assert _environment().undefined.__name__ == "StrictUndefined"
