"""Parameters and keys and values of a model from its config.json alone, by arithmetic.

Counted are all matrices, an expert's biases and the norms of a layer's width. Left out are the vectors inside
attention (biases, norms of heads, sinks), under 0.1 % of any model here. Layers that only predict further tokens
(MTP) are no part of a forward pass and not counted, though published totals may count them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..traces.errors import InputError
from .sizing import FORMATS, Format, ModelSize

FULL, LINEAR = "full_attention", "linear_attention"
WINDOWED = ("sliding_attention", "chunked_attention")
GATED = ("qwen3_next", "qwen3_5")  # families whose queries come with an output gate of the same size
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
RECURRENT_BYTES = 4  # linear attention accumulates in float32


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of a configuration; one that is missing is an InputError that names file and field."""

    fields: Mapping[str, Any]
    source: str

    def get(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there and not null."""
        for name in names:
            value = self.fields.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
            if value is not None:
                raise InputError(f"{self.source}: {name} is {value!r}, where a whole number is needed")
        if default is None:
            raise InputError(f"{self.source}: {' or '.join(names)} is missing; give a decoder's config.json")
        return default

    @property
    def family(self) -> str:
        return str(self.fields.get("model_type", ""))

    @property
    def hidden(self) -> int:
        return self.get("hidden_size")

    @property
    def heads(self) -> int:
        return self.get("num_attention_heads")

    @property
    def head_width(self) -> int:
        return self.get("head_dim", default=self.hidden // self.heads)

    @property
    def kv_heads(self) -> int:
        return self.get("num_key_value_heads", default=self.heads)

    @property
    def experts(self) -> int:
        return self.get("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0)

    @property
    def expert_width(self) -> int:
        return self.get("moe_intermediate_size", "intermediate_size")


def count(config: Mapping[str, Any], name: str, source: str) -> ModelSize:
    """Count a configuration as transformers writes it (of a multimodal model, its text part).

    InputError names the file and what is missing in it or not understood.
    """
    c = Config({**config, **(config.get("text_config") or {})}, source)
    layers = c.get("num_hidden_layers")
    kinds = _attention_kinds(c, layers)
    moe = tuple(i for i in range(layers) if c.experts and _has_experts(c, i))
    linear, windowed = kinds.count(LINEAR), sum(k in WINDOWED for k in kinds)
    table = c.get("vocab_size") * c.hidden
    return ModelSize(
        name=name,
        source=source,
        family=c.family,
        layers=layers,
        moe_layers=moe,
        experts=c.experts if moe else 0,
        top_k=c.get("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k") if moe else 0,
        hidden=c.hidden,
        expert_width=c.expert_width if moe else 0,
        expert=_expert(c) if moe else 0,
        body=_body(c, layers, len(moe), linear),
        embedding=table,
        head=0 if c.fields.get("tie_word_embeddings", False) else table,
        latent=c.get("kv_lora_rank", default=0) > 0,
        kv_growing=(layers - linear - windowed) * _kept(c),
        kv_window=windowed * _kept(c),
        window=c.get("sliding_window", "attention_chunk_size") if windowed else 0,
        state_bytes=linear * _state_bytes(c) if linear else 0,
        longest=c.get("max_position_embeddings", default=0) or None,
        published=_published(c),
    )


def _body(c: Config, layers: int, moe: int, linear: int) -> int:
    """All but routed experts and tables: attention, norms, routers, shared experts, dense layers."""
    total = (layers - linear) * _attention(c) + (2 * layers + 1) * c.hidden
    if linear:
        total += linear * _linear_attention(c)
    if moe:
        total += moe * (c.hidden * c.experts + _shared(c))
    if moe < layers:
        total += (layers - moe) * 3 * c.hidden * c.get("intermediate_size_mlp", "intermediate_size")
    return total


def _attention_kinds(c: Config, layers: int) -> list[str]:
    """What each layer attends with. Without a list: every `full_attention_interval`-th in full, or all."""
    kinds = c.fields.get("layer_types")
    if kinds is None:
        interval = c.get("full_attention_interval", default=1)
        kinds = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
    strange = [k for k in kinds if k not in (FULL, LINEAR, *WINDOWED)]
    if strange or len(kinds) != layers:
        what = f"a layer of type {strange[0]!r}" if strange else f"{len(kinds)} layer_types for {layers} layers"
        raise InputError(f"{c.source}: {what} is not understood; fit knows {FULL}, {LINEAR} and {', '.join(WINDOWED)}")
    return list(kinds)


def _has_experts(c: Config, layer: int) -> bool:
    """Which layers are dense is written in as many ways as there are families."""
    if layer < c.get("first_k_dense_replace", "moe_layer_start_index", default=0):
        return False
    if layer in (c.fields.get("mlp_only_layers") or ()):
        return False
    listed, every = c.fields.get("moe_layers"), c.fields.get("moe_layer_freq")
    if isinstance(listed, list):
        return layer in listed
    if isinstance(every, list):
        return bool(every[layer])
    if every is not None:
        return layer % c.get("moe_layer_freq") == 0
    step = c.get("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    return step > 0 and (layer + 1) % step == 0


def _expert(c: Config) -> int:
    """Gate, up and down; gpt-oss has biases on all three."""
    biases = 2 * c.expert_width + c.hidden if c.family == "gpt_oss" else 0
    return 3 * c.hidden * c.expert_width + biases


def _shared(c: Config) -> int:
    """Shared experts of one layer, and the gate that weighs a Qwen one."""
    own = c.get("shared_expert_intermediate_size", default=0)
    if own:
        return 3 * c.hidden * own + c.hidden
    number = c.get("n_shared_experts", "moe_num_shared_experts", default=int(c.family.startswith("llama4")))
    return 3 * c.hidden * c.expert_width * number


def _attention(c: Config) -> int:
    latent = c.get("kv_lora_rank", default=0)
    if latent:
        rope, nope, value = c.get("qk_rope_head_dim"), c.get("qk_nope_head_dim"), c.get("v_head_dim")
        rank, queries = c.get("q_lora_rank", default=0), c.heads * (nope + rope)
        q = rank * (c.hidden + queries) if rank else c.hidden * queries
        return q + c.hidden * (latent + rope) + latent * c.heads * (nope + value) + c.heads * value * c.hidden
    gates = 1 if c.family.startswith(GATED) else 0
    return c.hidden * c.head_width * ((2 + gates) * c.heads + 2 * c.kv_heads)


def _linear_attention(c: Config) -> int:
    """A gated delta-rule layer: queries, keys, values and gate, two scalars a value head, convolution, output."""
    keys, values = _linear_widths(c)
    inputs = 2 * keys + 2 * values + 2 * c.get("linear_num_value_heads")
    return c.hidden * (inputs + values) + (2 * keys + values) * c.get("linear_conv_kernel_dim")


def _linear_widths(c: Config) -> tuple[int, int]:
    keys = c.get("linear_num_key_heads") * c.get("linear_key_head_dim")
    return keys, c.get("linear_num_value_heads") * c.get("linear_value_head_dim")


def _state_bytes(c: Config) -> int:
    keys, values = _linear_widths(c)
    recurrent = values * c.get("linear_key_head_dim") * RECURRENT_BYTES
    return recurrent + (2 * keys + values) * c.get("linear_conv_kernel_dim") * 2


def _kept(c: Config) -> int:
    """Numbers that one attention layer keeps for a token. Latent attention (MLA): the compressed vector."""
    latent = c.get("kv_lora_rank", default=0)
    return latent + c.get("qk_rope_head_dim") if latent else 2 * c.kv_heads * c.head_width


def _published(c: Config) -> Format:
    """The format of the published weights: `quantization_config` where there is one, else the data type.

    Bits are 0 where it is not understood, which matters only if nothing else is asked for.
    """
    dtype = str(c.fields.get("torch_dtype") or c.fields.get("dtype") or "bfloat16").removeprefix("torch.")
    plain = DTYPES.get(dtype, "bf16")
    bits = FORMATS[plain]
    quantized = c.fields.get("quantization_config")
    if not isinstance(quantized, Mapping):
        return Format(plain, bits, bits, bits)
    method = str(quantized.get("quant_method", ""))
    if method == "mxfp4":  # routed experts alone
        return Format(method, FORMATS[method], bits, bits)
    if method == "fp8":
        return Format(method, FORMATS[method], FORMATS[method], bits)
    width = quantized.get("bits") or (4 if quantized.get("load_in_4bit") else None)
    if not isinstance(width, int):
        return Format(method, 0.0, 0.0, 0.0)
    group = quantized.get("group_size") or 0
    packed = width + (20 / group if isinstance(group, int) and group > 0 else 0)  # a 16-bit scale, a 4-bit zero
    return Format(f"{method}-{width}bit", packed, packed, bits)
