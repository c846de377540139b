"""Configs of Hugging Face models: which fields say what, for each architecture.

Takes a config.json, gives its fields and the `Architecture` that tells how to read them. Knows
nothing of GEMMs. Must not import torch, CUDA or any third-party package, and reads nothing but
the file that `load_config` is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kgen.errors import UsageError

MAX_CONFIG_BYTES: Final = 16 * 2**20
#: Where configs of models that also see or hear keep the fields of their language model.
_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True)
class Experts:
    """Fields that describe a mixture of experts; of several names the first present one counts.

    layers          which layers have experts: "all", "after_dense" (first_k_dense_replace),
                    "sparse_step" (decoder_sparse_step), "interleaved" (Llama 4), "whichever"
    count, width    how many routed experts there are, and the width of each
    top_k           experts that a token goes to
    shared          how many shared experts of the width of a routed one there are
    shared_width    width of all shared experts together, where a config states that
    shared_default  shared experts where the config does not say
    optional        whether a model of the architecture may have no experts
    """

    layers: str = "all"
    count: tuple[str, ...] = ("n_routed_experts", "num_experts", "num_local_experts")
    width: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    top_k: tuple[str, ...] = ("num_experts_per_tok", "experts_per_token")
    shared: str = "n_shared_experts"
    shared_width: str = "shared_expert_intermediate_size"
    shared_default: int = 0
    optional: bool = False


@dataclass(frozen=True)
class Architecture:
    """How the configs of one family are read.

    mla      whether attention is multi-head latent attention; None: where kv_lora_rank is given
    experts  None where a model of the family never has any
    names    what the family calls a field that others call by its usual name
    """

    mla: bool | None = False
    experts: Experts | None = None
    names: Mapping[str, str] = field(default_factory=dict)


_LLAMA: Final = Architecture()
_QWEN_MOE: Final = Architecture(experts=Experts("sparse_step", shared=""))
_MIXTRAL: Final = Architecture(experts=Experts(shared="", shared_width=""))
_DEEPSEEK: Final = Architecture(mla=True, experts=Experts("after_dense"))
_LLAMA4: Final = Architecture(
    experts=Experts("interleaved", width=("intermediate_size",), shared_default=1),
    names={"intermediate_size": "intermediate_size_mlp"},
)
_CHATGLM: Final = Architecture(
    names={
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "multi_query_group_num",
        "head_dim": "kv_channels",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "padded_vocab_size",
    },
)
#: Any other model: what its fields say by their usual names.
GENERIC: Final = Architecture(mla=None, experts=Experts("whichever", optional=True))

#: `model_type` to the way of reading it.
ARCHITECTURES: Final[dict[str, Architecture]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "glm", "glm4"), _LLAMA),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text"), _LLAMA),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"), _QWEN_MOE),
    **dict.fromkeys(("mixtral", "gpt_oss"), _MIXTRAL),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), _DEEPSEEK),
    "glm4_moe": Architecture(experts=Experts("after_dense")),
    "chatglm": _CHATGLM,
    **dict.fromkeys(("llama4", "llama4_text"), _LLAMA4),
}
#: `model_type` of models whose MLP has no gate: its first layer is half as wide as read here.
_NO_GATE: Final = (
    *("bert", "roberta", "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom"),
    *("falcon", "phi", "starcoder2", "nemotron", "mpt", "persimmon", "arcee"),
)
#: Fields of architectures with other layers than attention and a gated MLP.
_OTHER_LAYERS: Final = (
    *("linear_num_value_heads", "mamba_d_state", "mamba_d_ssm", "ssm_state_size", "ssm_cfg"),
    *("attn_layer_period", "lru_width", "encoder_layers"),
)


class Config:
    """Fields read by their usual names; mistakes are gathered, so that all are said at once."""

    def __init__(self, fields: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._fields = fields
        self._names = names
        self.mistakes: list[str] = []

    def raw(self, name: str) -> Any:
        """What the config says, None where it says nothing."""
        return self._fields.get(self._names.get(name, name))

    def has(self, name: str) -> bool:
        """Whether the config says anything, null being nothing."""
        return self.raw(name) is not None

    def number(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least`; without a default the field is needed."""
        spelled = self._names.get(name, name)
        if default is not None and self._fields.get(spelled) is None:
            return default
        return self._number(spelled, least)

    def first(self, spellings: Sequence[str]) -> int:
        """The number in the first of these fields that is there, by their names in the file."""
        return self._number(self.spelling(spellings), 1)

    def spelling(self, spellings: Sequence[str]) -> str:
        """Which of these names the file has: the first present one, or the first where none is."""
        present = (name for name in spellings if self._fields.get(name) is not None)
        return next(present, spellings[0])

    def blame(self, mistake: str) -> None:
        """Note what is wrong, once."""
        if mistake not in self.mistakes:
            self.mistakes.append(mistake)

    def _number(self, spelled: str, least: int) -> int:
        value = self._fields.get(spelled)
        if type(value) is int and value >= least:
            return value
        given = "is missing" if value is None else f"is {value!r}"
        self.blame(f"{spelled} {given}: expected a whole number from {least}")
        return max(1, least)  # reading goes on, to find what else is wrong


def load_config(path: str | Path) -> dict[str, Any]:
    """The fields of a config.json, or of the one in a folder. Raises UsageError."""
    file = Path(path)
    try:
        file = file / "config.json" if file.is_dir() else file
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{file}: can not be read: {reason}; expected a config.json") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise UsageError(f"{file}: larger than {MAX_CONFIG_BYTES} bytes: no config.json")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise UsageError(f"{file}: expected a JSON object, the fields of a model's config")
    return fields


def language_model(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The fields of the language model, which may be one part of several, and notes on that."""
    for name in _NESTED:
        inner = fields.get(name)
        if isinstance(inner, dict) and "hidden_size" not in fields:
            inner, notes = language_model(inner)
            outer = {"quantization_config": fields.get("quantization_config")}
            return {**outer, **inner}, [f"read from {name}: the language model alone", *notes]
    return fields, []


def architecture_of(fields: Mapping[str, Any]) -> tuple[Architecture, list[str]]:
    """How these fields are read, and a note where that is a guess.

    Raises UsageError for a model that is known to have other layers.
    """
    model_type = fields.get("model_type") or ""
    if not isinstance(model_type, str):
        raise UsageError(f"model_type={model_type!r}: expected a name; {_known()}")
    if model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type], []
    if model_type in _NO_GATE:
        raise UsageError(f"model_type={model_type!r}: its MLP has no gate; {_known()}")
    other = [name for name in _OTHER_LAYERS if fields.get(name) is not None]
    if "linear_attention" in _texts(fields.get("layer_types")):
        other.append("layer_types with linear_attention")
    if other:
        why = ", ".join(other)
        raise UsageError(f"model_type={model_type!r}: layers kgen does not know, {why}; {_known()}")
    given = f"unknown model_type {model_type!r}" if model_type else "no model_type"
    return GENERIC, [f"{given}: read like Llama by the usual names of fields; check the layers"]


def _texts(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _known() -> str:
    return f"known are {', '.join(ARCHITECTURES)}"
