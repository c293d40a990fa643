"""A lean forward pass over transformers' own parameters, for decoders of Llama's plan.

At batch 1 the calls cost more than the arithmetic: eager transformers makes some 230 tensor operations a layer, most of
them for generality. Here a layer takes about 40: weights are looked up once and not at every step, queries and keys are
normalised and turned together in buffers that stay, rotary angles come from a table, and keys and values go straight
into a preallocated cache from which tokens are forgotten by lowering a number. Values are computed by the same
operations in the same order, so that float32 logits on the CPU are those of transformers, bit for bit on the machine
where this was written (`tests/benchmarks/bench_floor.py` prints the largest difference).

Routers and experts are called as modules wherever somebody watches them (hooks), so recording works as before.
`refusal` says why a model is not run this way: a family, option or layer that this code does not know.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

FAMILIES = (
    "Qwen3MoeForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2ForCausalLM", "OlmoeForCausalLM",
    "MixtralForCausalLM", "LlamaForCausalLM",
)  # fmt: skip
# Routers: softmax of all logits in float32, then top-k. Whether the weights are cast back to the logits' type.
ROUTERS = {"Qwen3MoeTopKRouter": True, "OlmoeTopKRouter": True, "Qwen2MoeTopKRouter": True, "MixtralTopKRouter": False}
# Rotary tables of these do not depend on how long the text has become.
ROPE = ("default", "linear", "llama3", "yarn")
CAPACITY = 256  # tokens for which a cache has room at first
KEPT_ROWS = 16  # a verify step has no more; buffers of longer passes are made anew
linear: Any = F.linear  # its `out` is missing from the stubs
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMS = {"q_norm", "k_norm"}
PLAIN = {torch.Tensor, torch.nn.Parameter}
# Every option that a configuration class of these families declares, and whose effect is in the modules read here, in
# `refusal`, or nowhere in inference. An option that a later transformers adds is not among them.
OPTIONS = {
    "attention_bias", "attention_dropout", "bos_token_id", "clip_qkv", "decoder_sparse_step", "eos_token_id",
    "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "mlp_bias", "mlp_only_layers", "moe_intermediate_size",
    "norm_topk_prob", "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers",
    "num_key_value_heads", "num_local_experts", "output_router_logits", "pad_token_id", "pretraining_tp", "qkv_bias",
    "rms_norm_eps", "rope_parameters", "router_aux_loss_coef", "router_jitter_noise",
    "shared_expert_intermediate_size", "sliding_window", "tie_word_embeddings", "use_cache", "use_sliding_window",
    "vocab_size",
}  # fmt: skip


def refusal(model: Any) -> str | None:
    """Why transformers' own forward is used for this model; None if the lean one is."""
    if type(model).__name__ not in FAMILIES:
        return f"the lean forward does not know {type(model).__name__}"
    config, layers = model.config, model.model.layers
    if model.training or config._attn_implementation != "sdpa":
        return f"it is in training, or its attention is not sdpa but {config._attn_implementation}"
    new = set(inspect.get_annotations(type(config))) - OPTIONS
    if new:
        return f"{type(config).__name__} has options that the lean forward does not know: {', '.join(sorted(new))}"
    if _windows(config):
        return "some of its layers attend to a sliding window"
    if getattr(config, "clip_qkv", None) is not None:
        return "it clips queries, keys and values (clip_qkv)"
    rope = model.model.rotary_emb
    if rope.rope_type not in ROPE or 2 * len(rope.inv_freq) != layers[0].self_attn.head_dim:
        return f"its rotary embedding ({rope.rope_type}) changes with the text's length or turns a part of a head only"
    return next((reason for layer in layers if (reason := _strange(layer))), None) or _mixed(model)


def _windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


def _strange(layer: Any) -> str | None:
    """What is not as expected in one layer: quantised or adapted projections, further modules, replaced forwards."""
    attention = layer.self_attn
    parts = dict(attention.named_children())
    odd = set(parts) - LINEAR - NORMS or {n for n in LINEAR if type(parts.get(n)) is not torch.nn.Linear}
    if odd:
        return f"its attention has parts that the lean forward does not know: {', '.join(sorted(odd))}"
    replaced = next((name for name, m in layer.named_modules() if "forward" in vars(m)), None)
    return None if replaced is None else f"the forward of {replaced} was replaced"


def _mixed(model: Any) -> str | None:
    """Whether weights outside the experts are spread over devices or number formats."""
    kinds = {(p.dtype, p.device.type) for name, p in model.named_parameters() if ".experts." not in name}
    return None if len(kinds) == 1 else f"its weights are of several kinds ({', '.join(sorted(map(str, kinds)))})"


class Norm:
    """Root mean square norm over the last dimension, in transformers' order of operations."""

    def __init__(self, module: Any) -> None:
        self.weight, self.width = module.weight, module.weight.shape[-1]
        self.number = module.variance_epsilon
        self.eps, self.count = torch.tensor(self.number), torch.tensor(float(self.width))
        # On other devices one fused kernel does it; on the CPU that operation is made of parts, which cost more.
        self._by_parts = self.weight.device.type == "cpu" and self.weight.dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x).mul_(self.weight)

    def scaled(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Without the weight."""
        if self._by_parts:
            mean = torch.addcdiv(self.eps, torch.sum(x * x, -1, True), self.count)  # of squares, and eps
            return torch.mul(x, mean.rsqrt_(), out=out)
        scaled = F.rms_norm(x, x.shape[-1:], None, self.number)
        return scaled if out is None else out.copy_(scaled)


class Buffers:
    """Where queries, keys and values of n rows are made, and the views that the steps need.

    `wide` holds each head as (a, b, a), so that (a, b) and its half turn (b, a) are both views of it.
    """

    def __init__(self, n: int, heads: int, kv_heads: int, width: int, like: torch.Tensor) -> None:
        both, half = heads + kv_heads, width // 2
        projected = like.new_empty(n, (both + kv_heads) * width)
        self.projected = projected
        self.q, self.k, self.v = projected.split([heads * width, kv_heads * width, kv_heads * width], -1)
        self.made = projected[:, : both * width].view(n, both, width)
        self.value = projected[:, both * width :].view(n, kv_heads, width)
        wide = like.new_empty(n, both, width + half)
        self.plain, self.swapped = wide[..., :width], wide[..., half:]
        self.first, self.repeated = wide[..., :half], wide[..., width:]
        self.turned, self.product = like.new_empty(n, both, width), like.new_empty(n, both, width)
        self.query = self.turned[:, :heads].transpose(0, 1)[None]  # [1, heads, n, width]
        self.key = self.turned[:, heads:]


class Attention:
    """One layer's attention, on the residual stream x [n, hidden], which it adds to."""

    def __init__(self, layer: Any) -> None:
        own = layer.self_attn
        self.norm, self.normalise = Norm(layer.input_layernorm), _head_norms(own)
        self.q, self.k, self.v, self.o = ((p.weight, p.bias) for p in (own.q_proj, own.k_proj, own.v_proj, own.o_proj))
        self.joined = _joined([self.q, self.k, self.v])
        self.scale = own.scaling
        # Such weights may know a quicker way for the whole, if there are few rows.
        fuse = getattr(self.joined, "attend", None) if self.o[1] is None else None
        self.fused = None if fuse is None else fuse(layer, self.o[0])

    def __call__(self, x: torch.Tensor, at: "Place", cached: tuple[torch.Tensor, ...]) -> None:
        """cached: keys and values [1, kv heads, length, width] with the new ones still empty, and these by themselves,
        [n, kv heads, width]."""
        b, (keys, values, new_keys, new_values) = at.buffers, cached
        if self.fused is not None and self.fused(x, at.cos, at.sin, keys, values):
            return
        hidden = self.norm(x)
        if self.joined is not None:
            linear(hidden, self.joined, out=b.projected)
        else:
            linear(hidden, *self.q, out=b.q)
            linear(hidden, *self.k, out=b.k)
            linear(hidden, *self.v, out=b.v)
        self.normalise(b)
        b.repeated.copy_(b.first)
        torch.mul(b.swapped, at.sin, out=b.product)
        torch.mul(b.plain, at.cos, out=b.turned).add_(b.product)
        new_keys.copy_(b.key)
        new_values.copy_(b.value)
        out = F.scaled_dot_product_attention(
            b.query, keys, values, at.mask, is_causal=at.causal, scale=self.scale, enable_gqa=True
        )
        x.add_(linear(out.transpose(1, 2).reshape(len(x), -1), *self.o))


def _joined(parts: Sequence[tuple[Any, Any]]) -> Any:
    """Query, key and value weights in one, where they are of a kind of their own (`executor/dense.py`) that can be
    joined without another copy, and have no biases; else None."""
    weights = [weight for weight, bias in parts if bias is None and type(weight) not in PLAIN]
    return torch.cat(weights) if len(weights) == len(parts) else None


def _head_norms(own: Any) -> Callable[[Buffers], None]:
    """Takes projected queries and keys to where they are turned, normalised as the family does it."""
    if not hasattr(own, "q_norm"):

        def nothing(b: Buffers) -> None:
            b.plain.copy_(b.made)

        return nothing
    q_norm, k_norm = Norm(own.q_norm), Norm(own.k_norm)

    def rows(b: Buffers) -> None:  # OLMoE: all heads of a token together
        b.q.copy_(q_norm(b.q))
        b.k.copy_(k_norm(b.k))
        b.plain.copy_(b.made)

    if q_norm.width != own.head_dim:
        return rows
    counts = (len(p.weight) // own.head_dim for p in (own.q_proj, own.k_proj))
    weight = torch.cat([norm.weight.expand(c, -1) for norm, c in zip((q_norm, k_norm), counts, strict=True)])

    def heads(b: Buffers) -> None:  # Qwen3: each head by itself, so queries and keys in one go
        q_norm.scaled(b.made, b.plain).mul_(weight)

    return heads


@dataclass(slots=True)
class Place:
    """Where in the text a pass is: its buffers, the angles' cosines and signed sines [n, 1, width], the mask."""

    buffers: Buffers
    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor | None
    causal: bool


class Dense:
    """A dense feed-forward part."""

    def __init__(self, mlp: Any) -> None:
        self.gate, self.up, self.down = ((p.weight, p.bias) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self.act = F.silu if isinstance(mlp.act_fn, torch.nn.SiLU) else mlp.act_fn

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        gated = self.act(linear(hidden, *self.gate)).mul_(linear(hidden, *self.up))
        return linear(gated, *self.down)


class Routed:
    """Routed experts without a shared one. The experts module is called as ever, and so is a router that is watched."""

    def __init__(self, block: Any) -> None:
        self.gate, self.experts = block.gate, block.experts
        self.weight, self.top_k = block.gate.weight, block.gate.top_k
        self.renormalised = getattr(block.gate, "norm_topk_prob", True)
        self.cast = ROUTERS[type(block.gate).__name__]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.gate._forward_pre_hooks or self.gate._forward_hooks:
            _, weights, ids = self.gate(hidden)
            return self.experts(hidden, ids, weights)
        logits = linear(hidden, self.weight)
        weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), self.top_k)
        if self.renormalised:
            weights.div_(torch.sum(weights, -1, True))
        return self.experts(hidden, ids, weights.to(logits.dtype) if self.cast else weights)


def _feed_forward(mlp: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    names = {name for name, _ in mlp.named_children()}
    if names == {"gate", "experts"} and type(mlp.gate).__name__ in ROUTERS:
        return Routed(mlp)
    if names == {"gate_proj", "up_proj", "down_proj", "act_fn"} and type(mlp.gate_proj) is torch.nn.Linear:
        return Dense(mlp)
    return lambda hidden: mlp(hidden[None])[0]


class LeanModel:
    """A model with its key/value cache, as `CachedModel`, run by the lean forward. `length` counts the cached tokens.

    Raises ValueError for a model with a `refusal`.
    """

    can_crop = True

    def __init__(self, model: Any, vocab: int) -> None:
        reason = refusal(model)
        if reason:
            raise ValueError(reason)
        self.model, self.vocab = model, vocab
        self.length = 0
        inner, config = model.model, model.config
        self._embedding, self._rotary, self._head = inner.embed_tokens.weight, inner.rotary_emb, model.lm_head
        self._norm = Norm(inner.norm)
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._width = inner.layers[0].self_attn.head_dim
        with torch.inference_mode():
            self._layers = [
                (Attention(layer), Norm(layer.post_attention_layernorm), _feed_forward(layer.mlp))
                for layer in inner.layers
            ]
            self._buffers: dict[int, Buffers] = {}
            self._keys = self._values = self._embedding.new_empty(len(self._layers), 0, self._kv_heads, self._width)
            self._grow(CAPACITY)

    @torch.inference_mode()
    def feed(self, ids: Sequence[int], keep: int) -> torch.Tensor:
        """Append `ids`; logits of the last `keep` of them, [keep, vocab] float32 on the model's device."""
        begin, end = self.length, self.length + len(ids)
        if end > self._keys.shape[1]:
            self._grow(end + max(CAPACITY, end // 4))
        x = F.embedding(torch.tensor(ids, device=self._embedding.device), self._embedding)
        at = self._place(begin, end)
        caches = (
            self._keys[:, :end].transpose(1, 2).unsqueeze(1), self._values[:, :end].transpose(1, 2).unsqueeze(1),
            self._keys[:, begin:end], self._values[:, begin:end],
        )  # fmt: skip
        views = zip(*(cache.unbind(0) for cache in caches), strict=True)
        for (attend, norm, think), cached in zip(self._layers, views, strict=True):
            attend(x, at, cached)
            x.add_(think(norm(x)))
        self.length = end
        return self._head(self._norm(x[-keep:]))[:, : self.vocab].float()

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens."""
        self.length -= count

    def expect_crops(self) -> None:
        """Nothing to do: what was forgotten is written over."""

    def can_forget(self, count: int) -> bool:
        return 0 <= count <= self.length

    def _grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens: keys and values [layers, capacity, kv heads, width], and their angles."""
        like = self._embedding
        # One after the other, so that only one of them is there twice.
        self._keys = self._larger(self._keys, capacity)
        self._values = self._larger(self._values, capacity)
        cos, sin = self._rotary(like, torch.arange(capacity, device=like.device)[None])
        sin[..., : self._width // 2].neg_()  # a half turn of (a, b) is (-b, a)
        self._cos, self._sin = cos[0][:, None], sin[0][:, None]

    def _larger(self, cache: torch.Tensor, capacity: int) -> torch.Tensor:
        made = cache.new_empty(len(self._layers), capacity, self._kv_heads, self._width)
        made[:, : self.length] = cache[:, : self.length]
        return made

    def _place(self, begin: int, end: int) -> Place:
        n = end - begin
        buffers = self._buffers.get(n)
        if buffers is None:
            buffers = Buffers(n, self._heads, self._kv_heads, self._width, self._embedding)
            if n <= KEPT_ROWS:
                self._buffers[n] = buffers
        mask = None
        if n > 1 and begin:
            like = self._embedding.new_full((n, end), float("-inf"))
            mask = like.triu_(begin + 1)
        return Place(buffers, self._cos[begin:end], self._sin[begin:end], mask, n > 1 and not begin)
