"""Find, check and load a target/draft pair, and measure its shape.

Everything that can be refused is refused from configurations and tokenizers, before a weight is read.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer

from .drafting import Ngram
from .errors import InputError
from .schema import DraftShape, ModelShape

PAIR = Path(__file__).parent / "pair"
EMBEDDED = "embedded"
NGRAM = "ngram"
SMALL_HIDDEN = 512
DTYPES = ("float32", "bfloat16", "float16")
LAYER = re.compile(r"\blayers?\.(\d+)\.")


class MoeBlock(NamedTuple):
    """One MoE layer's parts: absolute layer number, the module that chooses, the module that computes."""

    layer: int
    gate: torch.nn.Module
    experts: torch.nn.Module


@dataclass(frozen=True, slots=True)
class Pair:
    """A loaded target and, unless decoding is to be plain, its draft, a model or an `Ngram`.

    `stop_tokens` are the target's end tokens.
    """

    target: Any
    draft: Any | None
    tokenizer: Any
    shape: ModelShape
    draft_shape: DraftShape | None
    stop_tokens: tuple[int, ...]

    @property
    def models(self) -> list[Any]:
        """The target and the draft, unless that is the text itself."""
        return [model for model in (self.target, self.draft) if hasattr(model, "config")]


@dataclass(frozen=True, slots=True)
class Source:
    """A model that is named but not read: where it is, its configuration and tokenizer."""

    flag: str
    name: str
    place: str
    config: Any
    tokenizer: Any


Find = Callable[[str, str | Path | None, str], Source]


def load_pair(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    experts: str | None = None,
) -> Pair:
    """Load a pair by folder or Hugging Face name; target None is the embedded one, which brings its draft.

    Draft "none", or no draft with another target, means plain decoding; "ngram" looks drafts up in the text. `dtype`
    "auto" keeps the checkpoint's;
    `experts` names an experts implementation of transformers. Raises InputError: no such model, no experts,
    tokenizers that differ, weights that are damaged or incomplete.
    """
    with quiet():
        big, small = find_pair(target, draft)
        check_cache(big)
        shape = model_shape(big.config, big.name, dtype_of(big.config, dtype))
        helper, draft_shape = text_draft(big, draft)
        if small is not None:
            check_rollback(big, small)
            check_tokenizers(big, small)
            draft_shape = measure_draft(small.config, small.name, dtype_of(small.config, dtype))
        model = read_weights(big, shape.dtype, device, experts)
        if small is not None:
            helper = read_weights(small, dtype_of(small.config, dtype), device)
    suit_threads(shape, device)
    return Pair(model, helper, big.tokenizer, shape, draft_shape, stop_tokens(model))


def suit_threads(shape: ModelShape, device: str) -> None:
    """One thread on the CPU for a model whose matrices are too small to be shared out, unless the user has said.

    Nothing is gained by more, and where another process has one of the cores they wait for each other at every
    operation: the embedded pair then records fifteen times slower on two threads than on one.
    """
    if device == "cpu" and shape.hidden < SMALL_HIDDEN and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def find_pair(
    target: str | Path | None, draft: str | Path | None, find: Find | None = None
) -> tuple[Source, Source | None]:
    """Where both models are, from what the flags say (see `load_pair`); `find` looks for one, as `find_model` does."""
    find = find or find_model
    big = find("--target", target, "target")
    if draft is None and target is None:
        return big, find("--draft", None, "draft")
    if draft is None or str(draft) in ("none", NGRAM):
        return big, None
    return big, find("--draft", draft, "draft")


def text_draft(target: Source, draft: str | Path | None) -> tuple[Any, DraftShape | None]:
    """The draft that needs no model and weighs nothing, if the flag names it, else (None, None).

    Raises InputError for a target that cannot forget refused drafts.
    """
    if str(draft) != NGRAM:
        return None, None
    check_rollback(target)
    source = Ngram()
    return source, DraftShape(source.name, 0, 0, 0)


def find_model(flag: str, name: str | Path | None, role: str) -> Source:
    """Configuration and tokenizer of a folder, a hub name, or (None) the embedded model in that role."""
    place = str(PAIR / role) if name is None or str(name) == EMBEDDED else str(name)
    if place.startswith((".", "/", "~")) or place.count("/") > 1 or Path(place).is_dir():
        place = str(Path(place).expanduser())
        if not Path(place).is_dir():
            raise InputError(f"{flag} {name or EMBEDDED}: no such folder; give a folder or a Hugging Face name")
        if not (Path(place) / "config.json").is_file():
            raise InputError(f"{flag} {name or EMBEDDED}: the folder has no config.json; give a saved model's folder")
    try:
        config = AutoConfig.from_pretrained(place)
        tokenizer = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{flag} {name or EMBEDDED}: cannot be read here ({_first_line(error)}); give a saved model's folder, or "
            "a Hugging Face name that is in the local cache or reachable"
        ) from None
    shown = f"{EMBEDDED} {role}" if place == str(PAIR / role) else str(name)
    return Source(flag, shown, place, config, tokenizer)


def check_tokenizers(target: Source, draft: Source) -> None:
    """Raise InputError unless every token id means the same to both models.

    Ids that only one tokenizer has are tolerated at the end (added tokens), if both models have rows for them.
    """
    ours, theirs = _strings(target.tokenizer), _strings(draft.tokenizer)
    sizes = f"target {target.name} has {len(ours)} tokens, draft {draft.name} {len(theirs)}"
    advice = (
        "a draft must be trained with the target's tokenizer, for example Qwen/Qwen3-0.6B for Qwen/Qwen3-30B-A3B; "
        "or use --draft none"
    )
    common = min(max(ours), max(theirs)) + 1
    for token in range(common):
        if ours.get(token) != theirs.get(token):
            raise InputError(
                f"{draft.flag}: the tokenizers differ ({sizes}): id {token} is {ours.get(token)!r} in the target and "
                f"{theirs.get(token)!r} in the draft; {advice}"
            )
    rows = min(s.config.get_text_config().vocab_size for s in (target, draft))
    needed = max(max(ours), max(theirs)) + 1
    if rows < needed:
        raise InputError(
            f"{draft.flag}: the tokenizers differ ({sizes}): id {common} exists in one only, and the smaller model "
            f"has {rows} rows where {needed} are needed; {advice}"
        )


def check_cache(source: Source) -> None:
    """Raise InputError for a model that keeps its state in a cache of its own class, which generation here has not."""
    if source.config.get_text_config().model_type == "minimax":
        raise InputError(
            f"{source.flag} {source.name}: MiniMax-Text-01 keeps its state in a cache of its own, which is not "
            "supported here; MiniMax-M2 and other families are"
        )


def check_rollback(target: Source, draft: Source | None = None) -> None:
    """Raise InputError if a cache of the two cannot forget refused drafts: recurrent layers keep one state."""
    for source, role in [(target, "target"), *([] if draft is None else [(draft, "draft")])]:
        layers = DynamicCache(config=source.config.get_text_config()).layers
        stuck = sum(not layer.is_croppable for layer in layers)
        if stuck:
            raise InputError(
                f"--draft: the {role} ({source.name}) has {stuck} of {len(layers)} layers with linear attention or "
                "another recurrent state, which cannot be rolled back after a rejected draft; use --draft none"
            )


def model_shape(config: Any, name: str, dtype: str = "float32") -> ModelShape:
    """Shape of a target from its configuration alone: the model is laid out on torch's meta device and counted.

    Raises InputError for a model without experts.
    """
    with quiet():
        model = skeleton(config)
    blocks = moe_blocks(model)
    if not blocks:
        raise InputError(
            f"--target {name}: {type(model).__name__} has no routed experts to trace; give a mixture-of-experts "
            "model such as Qwen/Qwen3-30B-A3B"
        )
    strange = next((b.experts for b in blocks if not hasattr(b.experts, "is_transposed")), None)
    if strange is not None:
        raise InputError(
            f"--target {name}: {type(strange).__name__} is outside the experts registry of transformers, so its "
            "routing cannot be read; give a model of a family that uses it, such as Qwen3-MoE, Mixtral or DeepSeek"
        )
    text = config.get_text_config()
    size = torch.finfo(getattr(torch, dtype)).bits // 8
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    routed = sum(p.numel() for block in blocks for p in block.experts.parameters())
    experts, width = _expert_dimensions(blocks[0].experts)
    return ModelShape(
        name=name,
        layers=text.num_hidden_layers,
        moe_layers=tuple(block.layer for block in blocks),
        experts=experts,
        top_k=_top_k(blocks[0].gate, text),
        hidden=text.hidden_size,
        expert_width=width,
        dtype=dtype,
        expert_bytes=routed // (experts * len(blocks)) * size,
        dense_bytes=(sum(p.numel() for p in model.parameters()) - routed) * size,
        kv_bytes_per_token=_kv_numbers(text) * size,
        embedding_bytes=0 if tied else embedding.numel() * size,
    )


def _expert_dimensions(experts: Any) -> tuple[int, int]:
    """How many experts a layer has, and their inner width, from the stacked matrix that leads back."""
    number, rows, columns = experts.down_proj.shape
    return number, rows if experts.is_transposed else columns


def _top_k(gate: Any, text: Any) -> int:
    """Each family has a name of its own for it."""
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
    found = [getattr(text, name, None) for name in names]
    return int(getattr(gate, "top_k", None) or next(k for k in found if k))


def measure_draft(config: Any, name: str, dtype: str = "float32") -> DraftShape:
    """Shape of a draft from its configuration alone."""
    with quiet():
        model = skeleton(config)
    text = config.get_text_config()
    size = torch.finfo(getattr(torch, dtype)).bits // 8
    count = sum(p.numel() for p in model.parameters())
    return DraftShape(name, text.num_hidden_layers, count * size, _kv_numbers(text) * size)


def skeleton(config: Any) -> Any:
    """The model without its weights: every parameter on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def moe_blocks(model: torch.nn.Module) -> list[MoeBlock]:
    """The MoE layers of any model that keeps a layer's routed experts in one module beside a gate, in layer order."""
    found = []
    for path, module in model.named_modules():
        experts = getattr(module, "experts", None)
        gate = getattr(module, "gate", None) or getattr(module, "router", None)
        number = LAYER.search(path + ".")
        if number and isinstance(experts, torch.nn.Module) and isinstance(gate, torch.nn.Module):
            found.append(MoeBlock(int(number[1]), gate, experts))
    return sorted(found, key=lambda block: block.layer)


def stop_tokens(model: Any) -> tuple[int, ...]:
    """The ids that end a text, of which a model may have several."""
    ids = model.generation_config.eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def _kv_numbers(text: Any) -> int:
    """Keys and values, in numbers, that one more token of a long context adds to what is kept.

    Only layers that attend to all of it count: sliding windows are full by then, linear attention has a state of fixed
    size, and layers that share another's keys keep none. Latent attention (MLA) keeps the compressed vector and the
    rotary key (arXiv 2405.04434, section 2.1), as inference engines do; transformers itself keeps them expanded.
    """
    growing = [isinstance(c, DynamicLayer) and not c.is_sliding for c in DynamicCache(config=text).layers]
    return sum(_kept(layer) for layer, grows in zip(text.per_layer_config, growing, strict=False) if grows)


def _kept(layer: Any) -> int:
    """Numbers that one layer keeps for a token; `layer` is its own configuration, where layers differ (Gemma 4)."""
    latent = getattr(layer, "kv_lora_rank", None)
    if latent:
        return latent + layer.qk_rope_head_dim
    head = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return layer.num_key_value_heads * (head + (getattr(layer, "v_head_dim", None) or head))


def dtype_of(config: Any, wanted: str) -> str:
    if wanted == "auto":
        return str(config.get_text_config().dtype or "float32").removeprefix("torch.")
    if wanted not in DTYPES:
        raise InputError(f"--dtype {wanted}: unknown; choose auto, {', '.join(DTYPES)}")
    return wanted


def read_weights(source: Source, dtype: str, device: str, experts: str | None = None) -> Any:
    """Read the weights. A missing tensor is an error: transformers would fill it with random numbers and only warn."""
    choice = {"experts_implementation": experts} if experts else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.place, dtype=getattr(torch, dtype), output_loading_info=True, **choice
        )
        model, report = loaded
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{source.flag} {source.name}: the weights cannot be read ({_first_line(error)}); fetch the model again"
        ) from None
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            first = sorted(report[problem], key=str)[0]
            raise InputError(
                f"{source.flag} {source.name}: {len(report[problem])} weights with {problem.replace('_', ' ')}, first "
                f"{first}; the checkpoint does not fit its config.json"
            )
    return model.to(device).eval()


def _strings(tokenizer: Any) -> dict[int, str]:
    return {number: string for string, number in tokenizer.get_vocab().items()}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings or progress bars of transformers where nobody watches; its errors reach the user as ours."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    if not sys.stderr.isatty():
        log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
