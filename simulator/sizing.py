"""Sizes of a model, and how they become bytes in a format of weights. Known models by name; no torch, no network."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..traces.errors import InputError
from ..traces.schema import DraftShape, ModelShape

MODELS = Path(__file__).parent / "models"

# Bits per weight. q8_0: 34 bytes for 32 weights; q6_k: 210 for 256; mxfp4: 17 for 32; nvfp4: 9 for 16; q4_k_m mixes
# formats, and 4.862 is the mean of a published Qwen3-30B-A3B file (17.28 GiB).
FORMATS = {
    "fp32": 32.0,
    "bf16": 16.0,
    "fp16": 16.0,
    "fp8": 8.0,
    "q8": 8.5,
    "q8_0": 8.5,
    "q6_k": 6.5625,
    "q4": 4.862,
    "q4_k_m": 4.862,
    "mxfp4": 4.25,
    "nvfp4": 4.5,
}
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # as traces have them
KV_FORMATS = {"fp16": 16.0, "q8_0": 8.5}


@dataclass(frozen=True, slots=True)
class Format:
    """Bits per weight of routed experts, of the other matrices, and of the embedding and head."""

    name: str
    experts: float
    body: float
    tables: float


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameter counts of a model and what its keys and values take.

    `expert`: one routed expert. `body`: all that is neither a routed expert nor `embedding` or `head` (0 where tied).
    `latent`: keys and values are kept compressed (MLA).
    `kv_growing`: numbers kept for every token; `kv_window`: for each of the last `window` tokens; `state_bytes`: what
    linear attention keeps, whatever the context. `longest`: tokens that the model was made for. `published`: the
    format of its weights. A dense model has no `moe_layers`.
    """

    name: str
    source: str
    family: str
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    expert_width: int
    expert: int
    body: int
    embedding: int
    head: int
    latent: bool
    kv_growing: int
    kv_window: int
    window: int
    state_bytes: int
    longest: int | None
    published: Format

    @property
    def routed(self) -> int:
        return len(self.moe_layers) * self.experts * self.expert

    @property
    def routed_active(self) -> int:
        """Routed parameters that one token uses: what decoding reads (O28)."""
        return len(self.moe_layers) * self.top_k * self.expert

    @property
    def total(self) -> int:
        return self.routed + self.body + self.embedding + self.head

    @property
    def active(self) -> int:
        """Parameters that one token uses, the whole embedding and head included."""
        return self.routed_active + self.body + self.embedding + self.head

    def kv_bytes(self, context: int, kv: str = "fp16") -> int:
        """Keys, values and states of one sequence of `context` tokens."""
        numbers = self.kv_growing * context + self.kv_window * min(context, self.window)
        return round(numbers * KV_FORMATS[kv] / 8) + self.state_bytes

    def kv_fixed(self, kv: str = "fp16") -> int:
        """The part of `kv_bytes` that does not grow with the context, its windows being full."""
        return round(self.kv_window * self.window * KV_FORMATS[kv] / 8) + self.state_bytes

    def shape(self, form: Format, kv: str = "fp16") -> ModelShape:
        """As a target; `kv_bytes_per_token` is of the layers that keep every token."""
        tables = (self.embedding + self.head) * form.tables
        return ModelShape(
            name=self.name,
            layers=self.layers,
            moe_layers=self.moe_layers,
            experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            expert_width=self.expert_width,
            dtype=TORCH_NAMES.get(form.name, form.name),
            expert_bytes=round(self.expert * form.experts / 8),
            dense_bytes=round((self.body * form.body + tables) / 8),
            kv_bytes_per_token=round(self.kv_growing * KV_FORMATS[kv] / 8),
            embedding_bytes=round(self.embedding * form.tables / 8) if self.head else 0,
        )

    def as_draft(self, kv: str = "fp16") -> DraftShape:
        """As a draft, in its published format."""
        form = known_format(self)
        bits = self.body * form.body + self.routed * form.experts + (self.embedding + self.head) * form.tables
        return DraftShape(self.name, self.layers, round(bits / 8), round(self.kv_growing * KV_FORMATS[kv] / 8))


def format_for(text: str, size: ModelSize) -> Format:
    """The format that `--quant` names: "published", a key of `FORMATS`, or bits per weight as in "4.5bit".

    A named one holds for every weight, as in a GGUF file of that kind.
    """
    if text == "published":
        return known_format(size)
    bits = FORMATS.get(text.lower())
    if bits is None:
        try:
            bits = float(text.lower().removesuffix("bits").removesuffix("bit"))
        except ValueError:
            bits = 0.0
    if not 1 <= bits <= 32:
        raise InputError(f"--quant {text}: unknown; choose published, {', '.join(FORMATS)}, or bits such as 4.5bit")
    return Format(text.lower(), bits, bits, bits)


def known_format(size: ModelSize) -> Format:
    """The format of the published weights; InputError if their configuration does not make it plain."""
    if not size.published.experts:
        raise InputError(f"{size.source}: quantization_config {size.published.name!r} is not understood; give --quant")
    return size.published


def known_models() -> list[str]:
    return sorted(f.stem for f in MODELS.glob("*.json"))


def find_size(name: str, flag: str) -> ModelSize:
    """A known model by name (without regard to owner and case; "-FP8" for that release), a config.json or its folder.

    InputError names `flag` and the known models, or the field of a configuration that is missing.
    """
    from .parameters import count

    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return count(_read(path), path.resolve().parent.name, str(path))
    wanted = name.rsplit("/", 1)[-1]
    plain = wanted.lower().removesuffix("-fp8")
    for stem in known_models():
        entry = _read(MODELS / f"{stem}.json")
        own = entry["name"].rsplit("/", 1)[-1]
        names = {n.lower(): n for n in (stem, own, *entry["also"])}
        if plain in names:
            released = {"quantization_config": {"quant_method": "fp8"}} if plain != wanted.lower() else {}
            shown = own if plain == stem else names[plain]
            return count({**entry["config"], **released}, shown + ("-FP8" if released else ""), entry["source"])
    raise InputError(f"{flag} {name}: no known model and no config.json there; known: {', '.join(known_models())}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as a model's configuration ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a model's configuration, which is a JSON object")
    return content
