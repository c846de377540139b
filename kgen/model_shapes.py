"""Which GEMMs a Hugging Face model runs on one GPU: `model_shapes` from its config's fields.

Takes the fields of a config and how the model is split over GPUs; gives shape lines, and the
layers behind each. Must not import torch, CUDA or any third-party package; reads no file.

Layers are those of serving engines: q, k and v in one GEMM, gate and up in one, and the two
low-rank A projections of multi-head latent attention (MLA) in one. Tensor parallelism over `tp`
GPUs divides N of a column-parallel layer and K of a row-parallel one; KV heads that are fewer than
`tp` are copied; the A projections of MLA are not divided. A weight is how often one forward pass
runs the problem on one GPU.

Experts: `ep` GPUs share them out. Where ep >= tp, ep / tp groups of `tp` GPUs work on `tokens` rows
each and every expert lies whole on one GPU; where ep < tp, tp / ep GPUs divide each expert.
Routing counts as even: of E experts, h = min(E, rows * top_k) are hit, and each gets
ceil(rows * top_k / h) rows. Each expert is a dense problem of its own (`_expert_problem`), its
weight the number of layers times the experts hit on one GPU; or, with `Split.experts`, all of a
GPU's are one problem of that grouped kind, with the rows that each gets on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kgen.errors import UsageError
from kgen.model_configs import Architecture, Config, Experts, architecture_of, language_model
from kgen.problem import KINDS, SCALE_BLOCK, GemmProblem, ceil_div, round_up
from kgen.shapes import ShapeLine

#: Tokens that a forward pass works on, unless said otherwise: decoding, then prefill.
DEFAULT_TOKENS: Final = "1,16,64..4096*2"
#: What `lm_head` may be: its output type, or left out.
LM_HEADS: Final = ("bf16", "fp16", "fp32", "none")
#: Engines pad the vocabulary to a multiple of this before they divide it.
VOCABULARY_PAD: Final = 64
MAX_LAYERS: Final = 10_000


@dataclass(frozen=True)
class Split:
    """How a model is spread over GPUs, and what is asked of it.

    tokens    rows of A: tokens that one group of `tp` GPUs works on at a time
    tp, ep    GPUs that share a layer, and the experts
    lm_head   output type of the last layer, or "none" (see LM_HEADS)
    experts   kind of the experts' problems
    """

    tokens: tuple[int, ...]
    tp: int = 1
    ep: int = 1
    lm_head: str = "bf16"
    experts: str = "dense"

    def __post_init__(self) -> None:
        """Raises UsageError for numbers below 1, and for tp and ep that do not fit together."""
        numbers = [("tp", self.tp), ("ep", self.ep), *(("tokens", rows) for rows in self.tokens)]
        for name, value in numbers:
            if value < 1:
                raise UsageError(f"{name}={value}: expected at least 1")
        if self.lm_head not in LM_HEADS:
            raise UsageError(f"lm_head={self.lm_head!r}: expected one of {', '.join(LM_HEADS)}")
        if self.experts not in KINDS:
            raise UsageError(f"experts={self.experts!r}: expected one of {', '.join(KINDS)}")
        if self.tp % self.ep and self.ep % self.tp:
            raise UsageError(f"tp={self.tp} ep={self.ep}: one must be a multiple of the other")

    @property
    def expert_tp(self) -> int:
        """GPUs that divide one expert."""
        return max(1, self.tp // self.ep)

    @property
    def groups(self) -> int:
        """Groups of `tp` GPUs that send their tokens to the same experts."""
        return max(1, self.ep // self.tp)


@dataclass(frozen=True)
class ModelShapes:
    """The problems of a model in the order of its layers, each once, and notes for the user.

    layers    names of the layers behind a problem
    left_out  layers that kgen can not compute, each with the reason
    """

    lines: list[ShapeLine]
    layers: dict[GemmProblem, str]
    notes: list[str]
    left_out: list[str]


@dataclass(frozen=True)
class _Layer:
    """A linear layer as one GPU runs it.

    count    how many of it a forward pass runs
    cuts     (what, its extent, number of even parts it must come in)
    experts  experts that a GPU holds, each with this layer; 0: no expert's layer
    """

    name: str
    n: int
    k: int
    count: int
    cuts: tuple[tuple[str, int, int], ...] = ()
    experts: int = 0
    d_dtype: str = "bf16"


def model_shapes(fields: Mapping[str, Any], split: Split) -> ModelShapes:
    """The problems of a model with these config fields.

    Raises UsageError that names every field that is missing or wrong, or every extent that can
    not be divided, and for architectures whose layers are not known.
    """
    fields, notes = language_model(fields)
    architecture, guessed = architecture_of(fields)
    config = Config(fields, architecture.names)
    layers = list(_layers(config, architecture, split))
    if config.mistakes:
        raise UsageError(_listed("the config can not be used", config.mistakes))
    uneven = [text for layer in layers for text in _uneven(layer)]
    if uneven:
        raise UsageError(_listed(f"no split by tp={split.tp} ep={split.ep}", uneven))
    top_k = config.first(architecture.experts.top_k) if architecture.experts else 0
    weights: dict[GemmProblem, float] = {}
    names: dict[GemmProblem, dict[str, None]] = {}
    left_out = []
    for layer in layers:
        try:
            for problem, weight in _problems(layer, split, top_k):
                weights[problem] = weights.get(problem, 0.0) + weight
                names.setdefault(problem, {})[layer.name] = None
        except UsageError as error:
            left_out.append(f"{layer.name} is left out: {error}")
    return ModelShapes(
        [ShapeLine(problem, weight) for problem, weight in weights.items()],
        {problem: "; ".join(said) for problem, said in names.items()},
        [*notes, *guessed, *_notes(config, layers, split)],
        left_out,
    )


def _listed(what: str, mistakes: Sequence[str]) -> str:
    return f"{what}: {mistakes[0]}" if len(mistakes) == 1 else "\n  ".join([f"{what}:", *mistakes])


def _uneven(layer: _Layer) -> Iterator[str]:
    for what, extent, parts in layer.cuts:
        if extent % parts:
            yield f"{layer.name}: {what}={extent} is not a multiple of {parts}"


# ------------------------------------------------------------------------------- layers


def _layers(config: Config, architecture: Architecture, split: Split) -> Iterator[_Layer]:
    count = config.number("num_hidden_layers")
    if count > MAX_LAYERS:
        config.blame(f"num_hidden_layers is {count}: expected at most {MAX_LAYERS}")
        count = 1
    mla = config.has("kv_lora_rank") if architecture.mla is None else architecture.mla
    yield from (_mla if mla else _attention)(config, count, split.tp)
    experts = architecture.experts
    sparse = _sparse_layers(config, experts, count) if experts else 0
    if sparse < count:
        sizes = (config.number("intermediate_size"), split.tp, count - sparse)
        yield from _mlp(config, "mlp", "intermediate_size", sizes)
    if experts and sparse:
        yield from _mixture(config, experts, sparse, split)
    if split.lm_head != "none":
        vocabulary = round_up(config.number("vocab_size"), VOCABULARY_PAD)
        cuts = (("padded vocab_size", vocabulary, split.tp),)
        n, k = vocabulary // split.tp, config.number("hidden_size")
        yield _Layer("lm_head", n, k, 1, cuts, d_dtype=split.lm_head)


def _attention(config: Config, count: int, tp: int) -> Iterator[_Layer]:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", heads)
    if not config.has("head_dim") and not config.mistakes and hidden % heads:
        config.blame(f"head_dim is missing, and hidden_size={hidden} is no multiple of {heads}")
    dim = config.number("head_dim", max(1, hidden // heads))
    # Fewer KV heads than GPUs: each is copied to as many GPUs as it takes.
    copied = ("tp, over which KV heads are copied,", tp, kv_heads)
    kv_cut = ("num_key_value_heads", kv_heads, tp) if kv_heads >= tp else copied
    cuts = (("num_attention_heads", heads, tp), kv_cut)
    n = (heads // tp + 2 * max(1, kv_heads // tp)) * dim
    yield _Layer("attention qkv", n, hidden, count, cuts)
    yield _Layer("attention output", hidden, heads // tp * dim, count)


def _mla(config: Config, count: int, tp: int) -> Iterator[_Layer]:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    kv_rank, rope = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
    nope, v_dim = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    q_rank = config.number("q_lora_rank") if config.has("q_lora_rank") else 0
    cuts = (("num_attention_heads", heads, tp),)
    local = heads // tp
    if q_rank:
        yield _Layer("attention q_a and kv_a", q_rank + kv_rank + rope, hidden, count)
        yield _Layer("attention q_b", local * (nope + rope), q_rank, count, cuts)
    else:
        yield _Layer("attention q", local * (nope + rope), hidden, count, cuts)
        yield _Layer("attention kv_a", kv_rank + rope, hidden, count)
    # Decoding absorbs kv_b into its neighbours, one product a head; prefill runs it as it is.
    yield _Layer("attention kv_b (prefill)", local * (nope + v_dim), kv_rank, count)
    yield _Layer("attention output", hidden, local * v_dim, count)
    if q_rank and config.has("index_n_heads"):  # sparse attention's indexer, on every GPU whole
        dim = config.number("index_head_dim")
        yield _Layer("indexer q_b", config.number("index_n_heads") * dim, q_rank, count)
        yield _Layer("indexer k", dim, hidden, count)


def _mlp(
    config: Config, name: str, width_name: str, sizes: tuple[int, int, int], experts: int = 0
) -> Iterator[_Layer]:
    """Gate and up in one layer, and down; `sizes`: width, GPUs that divide it, layers."""
    width, tp, count = sizes
    hidden, cuts = config.number("hidden_size"), ((width_name, width, tp),)
    yield _Layer(f"{name} gate and up", 2 * (width // tp), hidden, count, cuts, experts)
    yield _Layer(f"{name} down", hidden, width // tp, count, (), experts)


def _mixture(config: Config, experts: Experts, count: int, split: Split) -> Iterator[_Layer]:
    width, total = config.first(experts.width), config.first(experts.count)
    config.first(experts.top_k)  # needed later, missed now
    shared = _shared_width(config, experts, width)
    if shared:
        yield from _mlp(config, "shared experts", "their width", (shared, split.tp, count))
    cut = (config.spelling(experts.count), total, split.ep)
    sizes = (width, split.expert_tp, count)
    local = max(1, total // split.ep)
    first, second = _mlp(config, "expert", config.spelling(experts.width), sizes, local)
    yield from (replace(first, cuts=(*first.cuts, cut)), second)


def _shared_width(config: Config, experts: Experts, width: int) -> int:
    if experts.shared_width and config.has(experts.shared_width):
        return config.number(experts.shared_width, least=0)
    if not experts.shared:
        return 0
    return config.number(experts.shared, experts.shared_default, least=0) * width


def _sparse_layers(config: Config, experts: Experts, count: int) -> int:
    """How many of the layers have experts."""
    if experts.optional and not config.raw(config.spelling(experts.count)):
        return 0
    return _SPARSE_LAYERS[experts.layers](config, count)


def _after_dense(config: Config, count: int) -> int:
    start = config.number("first_k_dense_replace", 0, least=0)
    step = config.raw("moe_layer_freq")
    if isinstance(step, list):  # one flag a layer
        return sum(map(bool, step[start:count]))
    step = config.number("moe_layer_freq", 1)
    return sum(index % step == 0 for index in range(start, count))


def _sparse_step(config: Config, count: int) -> int:
    step = config.number("decoder_sparse_step", 1)
    dense = config.raw("mlp_only_layers")
    dense = dense if isinstance(dense, list) else ()
    return sum((index + 1) % step == 0 and index not in dense for index in range(count))


def _interleaved(config: Config, count: int) -> int:
    listed = config.raw("moe_layers")
    if isinstance(listed, list):
        return len(listed)
    return count // config.number("interleave_moe_layer_step", 1)


def _whichever(config: Config, count: int) -> int:
    return (_after_dense if config.has("first_k_dense_replace") else _sparse_step)(config, count)


_SPARSE_LAYERS: Final[dict[str, Callable[[Config, int], int]]] = {
    "all": lambda _, count: count,
    "after_dense": _after_dense,
    "sparse_step": _sparse_step,
    "interleaved": _interleaved,
    "whichever": _whichever,
}


# --------------------------------------------------------------------- problems and notes


def _problems(layer: _Layer, split: Split, top_k: int) -> list[tuple[GemmProblem, float]]:
    """A layer's problem for each number of tokens, with its weight. Raises UsageError."""
    if layer.experts:
        routed = [tokens * split.groups * top_k for tokens in split.tokens]
        return [_expert_problem(layer, rows, split) for rows in routed]
    return [
        (GemmProblem("dense", rows, layer.n, layer.k, d_dtype=layer.d_dtype), float(layer.count))
        for rows in split.tokens
    ]


def _expert_problem(layer: _Layer, routed: int, split: Split) -> tuple[GemmProblem, float]:
    """The problem of an expert layer that `routed` rows reach on all `ep` GPUs, and its weight."""
    if split.experts != "dense":
        rows = ceil_div(routed, layer.experts * split.ep)
        problem = GemmProblem(split.experts, rows, layer.n, layer.k, groups=layer.experts)
        return problem, float(layer.count)
    hit = min(layer.experts * split.ep, routed)
    rows, hit_here = ceil_div(routed, hit), ceil_div(hit, split.ep)
    return GemmProblem("dense", rows, layer.n, layer.k), float(layer.count * hit_here)


def _notes(config: Config, layers: Sequence[_Layer], split: Split) -> list[str]:
    notes = []
    if split.ep > 1 and not any(layer.experts for layer in layers):
        notes.append(f"ep={split.ep} changes nothing: the model has no experts")
    if config.has("num_nextn_predict_layers"):
        notes.append("layers that predict further tokens (num_nextn_predict_layers) do not count")
    quantization = config.raw("quantization_config")
    return notes + (_on_scales(quantization, layers) if isinstance(quantization, dict) else [])


def _on_scales(quantization: Mapping[str, Any], layers: Sequence[_Layer]) -> list[str]:
    block = quantization.get("weight_block_size")
    if block != [SCALE_BLOCK, SCALE_BLOCK]:
        given = f"quant_method {quantization.get('quant_method')!r}"
        given += f" with weight_block_size {block}" if block else ""
        return [f"{given}: the sizes hold, but kgen computes in FP8 with a scale a 128x128 block"]
    return [
        f"{layer.name}: {extent // parts} columns a GPU cut through the 128x128 blocks of scales"
        for layer in layers
        for _, extent, parts in layer.cuts[:1]
        if parts > 1 and layer.name.endswith("gate and up") and extent // parts % SCALE_BLOCK
    ]
