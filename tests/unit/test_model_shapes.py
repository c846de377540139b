"""The layers of models, checked against sizes that papers, configs and benchmarks state."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kgen.errors import UsageError
from kgen.model_configs import ARCHITECTURES, load_config
from kgen.model_shapes import DEFAULT_TOKENS, ModelShapes, Split, model_shapes
from kgen.problem import GemmProblem
from kgen.shapes import merge, parse_line

Fields = dict[str, Any]

DEEPSEEK_V3: Fields = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "vocab_size": 163840,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "vocab_size": 102400,
}
LLAMA_70B: Fields = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MISTRAL_NEMO = LLAMA_70B | {
    "model_type": "mistral",
    "hidden_size": 5120,
    "intermediate_size": 14336,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "head_dim": 128,  # 32 * 128 is less than the hidden size
    "vocab_size": 131072,
}
MIXTRAL = MISTRAL_NEMO | {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
QWEN3_8B = LLAMA_70B | {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_235B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN2_57B = QWEN3_235B | {
    "model_type": "qwen2_moe",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "moe_intermediate_size": 2560,
    "shared_expert_intermediate_size": 20480,
    "num_experts": 64,
}
GLM_45 = QWEN3_235B | {
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 92,
    "first_k_dense_replace": 3,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "num_experts": None,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 1,
    "vocab_size": 151552,
}
GLM_4_9B: Fields = {
    "model_type": "chatglm",
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "num_layers": 40,
    "num_attention_heads": 32,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 128,
    "padded_vocab_size": 151552,
}
GPT_OSS_120B: Fields = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4"},
}
LLAMA_4_MAVERICK = LLAMA_70B | {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "head_dim": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "vocab_size": 202048,
}


def shapes(fields: Fields, tokens: int = 64, **split: Any) -> ModelShapes:
    return model_shapes(fields, Split((tokens,), **split))


def sizes(fields: Fields, **split: Any) -> dict[str, tuple[int, int, int]]:
    """Layer to N, K and weight, for 2048 tokens, at which no expert has the rows of a layer."""
    found = shapes(fields, 2048, **split)
    rows = {}
    for line in found.lines:
        for name in found.layers[line.problem].split("; "):
            rows[name] = (line.problem.n, line.problem.k, int(line.weight))
    return rows


def test_deepseek_v3_on_one_gpu() -> None:
    assert sizes(DEEPSEEK_V3) == {
        "attention q_a and kv_a": (2112, 7168, 61),  # 1536 + 512 + 64
        "attention q_b": (24576, 1536, 61),  # 128 * 192
        "attention kv_b (prefill)": (32768, 512, 61),
        "attention output": (7168, 16384, 61),
        "mlp gate and up": (36864, 7168, 3),
        "mlp down": (7168, 18432, 3),
        "shared experts gate and up": (4096, 7168, 58),
        "shared experts down": (7168, 2048, 58),
        "expert gate and up": (4096, 7168, 58 * 256),
        "expert down": (7168, 2048, 58 * 256),
        "lm_head": (129280, 7168, 1),
    }


def test_deepseek_v3_is_what_the_shipped_file_has() -> None:
    ours = {(line.problem.n, line.problem.k) for line in shapes(DEEPSEEK_V3).lines}
    text = Path(__file__).parents[2].joinpath("shapes", "deepseek_v3.txt").read_text()
    shipped = {(p.problem.n, p.problem.k) for row in text.splitlines() for p in parse_line(row)}
    assert shipped - ours == {(576, 7168)}  # kv_a alone, which V3 runs fused


def test_deepseek_v3_on_eight_gpus() -> None:
    rows = sizes(DEEPSEEK_V3, tp=8, ep=16)
    assert rows["attention q_a and kv_a"] == (2112, 7168, 61)  # on every GPU whole
    assert rows["attention q_b"][:2] == (3072, 1536)
    assert rows["attention kv_b (prefill)"][:2] == (4096, 512)
    assert rows["attention output"][:2] == (7168, 2048)
    assert rows["mlp gate and up"][:2] == (4608, 7168)
    assert rows["mlp down"][:2] == (7168, 2304)
    assert rows["shared experts down"][:2] == (7168, 256)
    assert rows["expert gate and up"] == (4096, 7168, 58 * 16)
    assert rows["lm_head"][:2] == (16160, 7168)


def test_deepseek_v2_lite_has_no_low_rank_q() -> None:
    rows = sizes(DEEPSEEK_V2_LITE)
    assert rows["attention q"] == (16 * 192, 2048, 27)
    assert rows["attention kv_a"] == (576, 2048, 27)
    assert rows["shared experts down"] == (2048, 2816, 26)
    assert rows["expert down"] == (2048, 1408, 26 * 64)
    assert "attention q_b" not in rows


def test_deepseek_v32_has_an_indexer() -> None:
    v32 = {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128}
    rows = sizes(DEEPSEEK_V3 | v32, tp=8)
    assert rows["indexer q_b"] == (8192, 1536, 61)
    assert rows["indexer k"] == (128, 7168, 61)


def test_kimi_k2() -> None:
    rows = sizes(KIMI_K2, tp=8, ep=16)
    assert rows["attention q_b"] == (1536, 1536, 61)
    assert rows["attention output"][:2] == (7168, 1024)
    assert rows["mlp down"] == (7168, 2304, 1)
    assert rows["expert down"] == (7168, 2048, 60 * 24)
    wrapped = {"model_type": "kimi_k25", "vision_config": {}, "text_config": KIMI_K2}
    assert sizes(wrapped, tp=8, ep=16) == rows
    assert shapes(wrapped).notes == ["read from text_config: the language model alone"]


def test_llama_70b() -> None:
    assert sizes(LLAMA_70B, tp=8) == {
        "attention qkv": (1280, 8192, 80),  # 8 heads and one KV head twice, of 128
        "attention output": (8192, 1024, 80),
        "mlp gate and up": (7168, 8192, 80),
        "mlp down": (8192, 3584, 80),
        "lm_head": (16032, 8192, 1),
    }
    assert sizes(LLAMA_70B)["attention qkv"][0] == 10240
    # Twice as many GPUs as KV heads: each GPU still has a whole one.
    assert sizes(LLAMA_70B, tp=16)["attention qkv"][0] == (4 + 2) * 128


def test_mistral_and_mixtral() -> None:
    rows = sizes(MISTRAL_NEMO)
    assert rows["attention qkv"][:2] == (6144, 5120)
    assert rows["attention output"][:2] == (5120, 4096)
    rows = sizes(MIXTRAL, ep=8)
    assert rows["expert gate and up"] == (28672, 4096, 32)
    assert rows["expert down"] == (4096, 14336, 32)
    assert not [name for name in rows if name.startswith(("mlp", "shared"))]


def test_qwen() -> None:
    rows = sizes(QWEN3_8B)
    assert rows["attention qkv"][:2] == (6144, 4096)
    assert rows["mlp gate and up"][:2] == (24576, 4096)
    rows = sizes(QWEN3_235B, tp=8, ep=8)
    assert rows["attention qkv"] == ((8 + 2) * 128, 4096, 94)  # 4 KV heads on 8 GPUs
    assert rows["attention output"] == (4096, 1024, 94)
    assert rows["expert gate and up"] == (3072, 4096, 94 * 16)
    assert rows["expert down"] == (4096, 1536, 94 * 16)
    assert "shared experts down" not in rows
    # Without expert parallelism the GPUs divide each expert.
    assert sizes(QWEN3_235B, tp=8)["expert down"] == (4096, 192, 94 * 128)


def test_qwen2_moe_has_one_wide_shared_expert() -> None:
    rows = sizes(QWEN2_57B, tp=4, ep=4)
    assert rows["shared experts gate and up"] == (10240, 3584, 28)
    assert rows["expert down"] == (3584, 2560, 28 * 16)


def test_some_qwen_layers_have_no_experts() -> None:
    rows = sizes(QWEN3_235B | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, ep=128)
    assert rows["expert down"][2] == 46  # 1, 3, 5 ... 93 but 1
    assert rows["mlp down"] == (4096, 12288, 48)


def test_glm() -> None:
    rows = sizes(GLM_45, tp=8, ep=16)
    assert rows["attention qkv"] == (14 * 128, 5120, 92)
    # The same problem twice: its weight is that of both.
    assert rows["attention output"] == rows["mlp down"] == (5120, 1536, 92 + 3)
    assert rows["expert gate and up"] == (3072, 5120, 89 * 10)
    assert "num_nextn_predict_layers" in shapes(GLM_45).notes[0]
    rows = sizes(GLM_4_9B)
    assert rows["attention qkv"] == (36 * 128, 4096, 40)
    assert rows["mlp gate and up"] == (27392, 4096, 40)
    assert rows["lm_head"] == (151552, 4096, 1)


def test_gpt_oss() -> None:
    rows = sizes(GPT_OSS_120B, ep=8)
    assert rows["attention qkv"] == (5120, 2880, 36)
    assert rows["attention output"] == (2880, 4096, 36)
    assert rows["expert gate and up"] == (5760, 2880, 36 * 16)
    assert rows["expert down"] == (2880, 2880, 36 * 16)
    assert rows["lm_head"] == (201088, 2880, 1)
    assert "mxfp4" in shapes(GPT_OSS_120B).notes[0]


def test_what_kgen_can_not_compute_is_left_out_by_name() -> None:
    found = shapes(GPT_OSS_120B, tp=8)  # 2880 / 8 = 360, no multiple of 16
    (said,) = found.left_out
    assert said.startswith("expert down is left out: k=360: TMA needs a multiple of 16")
    assert "expert gate and up" in found.layers.values()
    assert shapes(GPT_OSS_120B, tp=8, ep=8).left_out == []


def test_llama_4() -> None:
    rows = sizes(LLAMA_4_MAVERICK, tp=8, ep=8)
    assert rows["mlp down"] == (5120, 2048, 24)
    assert rows["shared experts down"] == (5120, 1024, 24)
    assert rows["expert gate and up"] == (16384, 5120, 24 * 16)


# ---- rows and weights


@pytest.mark.parametrize(
    ("tokens", "tp", "ep", "rows", "weight"),
    [
        (1, 1, 1, 1, 8),  # one token's eight experts
        (16, 1, 1, 1, 128),
        (32, 1, 1, 1, 256),
        (128, 1, 1, 4, 256),
        (100, 1, 1, 4, 256),  # 3.125 rows, rounded up
        (4096, 1, 1, 128, 256),
        (1, 8, 16, 1, 1),  # two groups of eight GPUs: 16 rows for 16 GPUs
        (128, 8, 16, 8, 16),
        (128, 8, 8, 4, 32),
        (128, 1, 64, 256, 4),  # 64 groups of one GPU
        (128, 8, 2, 4, 128),  # four GPUs divide each expert
    ],
)
def test_rows_of_an_expert(tokens: int, tp: int, ep: int, rows: int, weight: int) -> None:
    fields = DEEPSEEK_V3 | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    found = shapes(fields | {"n_shared_experts": None}, tokens, tp=tp, ep=ep)
    of_experts = [p for p, name in found.layers.items() if name == "expert gate and up"]
    (problem,) = of_experts
    assert problem.m == rows
    assert {line.problem: line.weight for line in found.lines}[problem] == weight
    assert problem.n == 4096 // max(1, tp // ep)


def test_problems_of_several_layers_stand_once_with_all_their_names() -> None:
    found = model_shapes(DEEPSEEK_V3, Split((1, 64, 128, 4096)))
    assert merge(found.lines).notes == []
    (line,) = [line for line in found.lines if line.problem.n == 4096 and line.problem.m == 128]
    assert found.layers[line.problem] == "shared experts gate and up; expert gate and up"
    assert line.weight == 58 + 58 * 256
    # Two and four rows for 64 and 128 tokens, and one for one.
    assert {p.m for p, name in found.layers.items() if name == "expert down"} == {2, 4}
    same = [line.weight for line in found.lines if (line.problem.m, line.problem.n) == (1, 4096)]
    assert same == [58 + 58 * 8]


@pytest.mark.parametrize("lm_head", ["bf16", "fp16", "fp32"])
def test_lm_head_has_an_output_type_of_its_own(lm_head: str) -> None:
    found = shapes(LLAMA_70B, lm_head=lm_head)
    (problem,) = [p for p, name in found.layers.items() if name == "lm_head"]
    assert problem.d_dtype == lm_head
    assert {p.d_dtype for p in found.layers} == {"bf16", lm_head}


def test_lm_head_can_be_left_out_and_its_vocabulary_is_padded() -> None:
    assert "lm_head" not in shapes(LLAMA_70B, lm_head="none").layers.values()
    assert sizes(LLAMA_70B | {"vocab_size": 32001}, tp=2)["lm_head"][0] == 16032


# ---- what is refused or noted


@pytest.mark.parametrize("name", sorted(set(LLAMA_70B) - {"model_type", "num_key_value_heads"}))
@pytest.mark.parametrize("value", [None, "many", 0, -1, 1.5, True, [8]])
def test_fields_that_are_missing_or_wrong_are_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        shapes(LLAMA_70B | {name: value})


@pytest.mark.parametrize(
    "name",
    [
        *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        *("n_routed_experts", "num_experts_per_tok"),
    ],
)
def test_deepseek_needs_its_fields(name: str) -> None:
    fields = {key: value for key, value in DEEPSEEK_V3.items() if key != name}
    with pytest.raises(UsageError, match=f"{name} is missing"):
        shapes(fields)


def test_every_mistake_is_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        shapes({"model_type": "llama", "hidden_size": 8192})
    text = str(caught.value)
    for name in ("num_attention_heads", "intermediate_size", "num_hidden_layers", "vocab_size"):
        assert text.count(f"{name} is missing") == 1


def test_a_head_dim_that_does_not_follow_is_asked_for() -> None:
    with pytest.raises(UsageError, match="head_dim is missing, and hidden_size=8192 is no mult"):
        shapes(LLAMA_70B | {"num_attention_heads": 48})


def test_what_does_not_divide_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        shapes(LLAMA_70B, tp=3)
    text = str(caught.value)
    assert "attention qkv: num_attention_heads=64 is not a multiple of 3" in text
    assert "num_key_value_heads=8 is not a multiple of 3" in text
    assert "mlp gate and up: intermediate_size=28672 is not a multiple of 3" in text
    with pytest.raises(UsageError, match="num_local_experts=8 is not a multiple of 16"):
        shapes(MIXTRAL, tp=8, ep=16)
    fields = LLAMA_70B | {"num_attention_heads": 96, "head_dim": 128, "num_key_value_heads": 8}
    with pytest.raises(UsageError, match="tp, over which KV heads are copied,=12"):
        shapes(fields, tp=12)


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ({"tp": 0}, "tp=0"),
        ({"ep": -1}, "ep=-1"),
        ({"tp": 8, "ep": 12}, "multiple of the other"),
        ({"lm_head": "fp8"}, "lm_head='fp8'"),
        ({"tokens": 0}, "tokens=0"),
    ],
)
def test_splits_that_can_not_be(split: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shapes(LLAMA_70B, **split)


def test_unknown_models_with_usual_fields_are_read_like_llama() -> None:
    found = shapes(LLAMA_70B | {"model_type": "newcomer"}, tp=8)
    assert found.lines == shapes(LLAMA_70B, tp=8).lines
    assert "unknown model_type 'newcomer'" in found.notes[0]
    none = {"model_type": "newcomer", "num_experts": 0}
    assert shapes(LLAMA_70B | none, tp=8).lines == found.lines
    nameless = {key: value for key, value in DEEPSEEK_V3.items() if key != "model_type"}
    found = shapes(nameless)
    assert found.lines == shapes(DEEPSEEK_V3).lines
    assert found.notes[0].startswith("no model_type: read like Llama")
    experts = shapes(QWEN3_235B | {"model_type": "newcomer"})
    assert experts.lines == shapes(QWEN3_235B).lines


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "gpt_neox"}, "no gate"),
        ({"model_type": "qwen3_next", "linear_num_value_heads": 32}, "linear_num_value_heads"),
        ({"model_type": "new", "layer_types": ["linear_attention"]}, "linear_attention"),
        ({"model_type": "mamba_like", "mamba_d_state": 128}, "mamba_d_state"),
        ({"model_type": 7}, "model_type=7"),
    ],
)
def test_models_with_other_layers_are_refused(fields: Fields, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        shapes(LLAMA_70B | fields)
    assert all(name in str(caught.value) for name in ARCHITECTURES)


def test_scales_that_a_split_cuts_are_noted() -> None:
    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert shapes(QWEN3_235B | blocks, tp=8, ep=8).notes == []
    (said,) = shapes(QWEN3_235B | blocks, tp=8).notes
    assert said.startswith("expert gate and up: 192 columns a GPU cut through")
    (said,) = shapes(LLAMA_70B, ep=2).notes
    assert said.startswith("ep=2 changes nothing")


def test_absurd_numbers_end_soon() -> None:
    with pytest.raises(UsageError, match="num_hidden_layers is"):
        shapes(DEEPSEEK_V3 | {"num_hidden_layers": 10**15})
    assert shapes(LLAMA_70B | {"hidden_size": 2**40}).left_out


def test_whatever_a_config_says_only_usage_errors_come() -> None:
    known = [DEEPSEEK_V3, QWEN3_235B, QWEN2_57B, GLM_4_9B, GPT_OSS_120B, LLAMA_4_MAVERICK]
    more = ["moe_layer_freq", "mlp_only_layers", "layer_types", "quantization_config", "moe_layers"]
    more += ["text_config", "interleave_moe_layer_step", "head_dim", "kv_lora_rank"]
    junk: list[Any] = [
        None,
        0,
        -1,
        7,
        2**31,
        10**30,
        1.5,
        "x",
        True,
        [],
        [1],
        {},
        {"hidden_size": []},
    ]
    random = Random(1)
    read = 0
    for _ in range(1000):
        fields = dict(random.choice(known))
        for _ in range(random.randint(1, 3)):
            fields[random.choice([*fields, *more])] = random.choice(junk)
        try:
            found = shapes(fields, tp=random.choice([1, 2, 3, 8]), ep=random.choice([1, 8]))
        except UsageError:
            continue
        read += 1
        assert set(found.layers) == {line.problem for line in found.lines}
    assert read > 100


def test_default_tokens_are_a_list_of_the_grammar() -> None:
    rows = [p.problem.m for p in parse_line(f"dense m={DEFAULT_TOKENS} n=8 k=16")]
    assert rows == [1, 16, 64, 128, 256, 512, 1024, 2048, 4096]


# ---- files


def test_a_config_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_70B))
    assert load_config(file) == load_config(tmp_path) == LLAMA_70B


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"", "not readable as JSON"), (b"[1]", "expected a JSON object"), (b"\xff\xfe{", "JSON")],
)
def test_files_that_are_no_config(tmp_path: Path, data: bytes, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(data)
    with pytest.raises(UsageError, match=said):
        load_config(file)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_config(tmp_path / "nothing.json")


@pytest.mark.parametrize("kind", ["contiguous", "masked"])
def test_experts_in_one_problem_of_a_grouped_kind(kind: str) -> None:
    """With 256 experts on 16 GPUs each has 16; 4096 tokens of 16 GPUs send 8 rows each."""
    found = model_shapes(DEEPSEEK_V3, Split((1, 4096), ep=16, experts=kind))
    lines = {line.problem: line.weight for line in found.lines if line.problem.kind == kind}
    assert lines == {
        GemmProblem(kind, 1, 4096, 7168, groups=16): 58.0,
        GemmProblem(kind, 1, 7168, 2048, groups=16): 58.0,
        GemmProblem(kind, 2048, 4096, 7168, groups=16): 58.0,
        GemmProblem(kind, 2048, 7168, 2048, groups=16): 58.0,
    }
    with pytest.raises(UsageError, match="experts='sparse': expected one of dense, contiguous"):
        Split((1,), experts="sparse")
