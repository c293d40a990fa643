"""GGUF files of Qwen3 models, read as checkpoints: Q8_0 and Q4_0 experts are records' blocks already.

The names are llama.cpp's (`blk.N.ffn_gate_exps.weight`), the numbers' order is transformers': these models rotate
halves, not pairs, so query and key rows were not permuted. Types other than a store's the `gguf` package decodes.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from transformers import AutoConfig, AutoTokenizer

from ..traces.errors import InputError
from ..traces.models import Source

SUFFIX = ".gguf"
BLOCKS = {"Q8_0": "q8", "Q4_0": "q4"}  # ggml types that are formats of a store
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
FIELDS = {  # of a configuration, by the end of the metadata's key
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
ROUTED = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}


class Tensor(NamedTuple):
    """Rows of a tensor of the file: ggml's type, numbers' shape, and where its bytes are."""

    type: Any
    shape: tuple[int, ...]
    offset: int
    size: int


class Gguf:
    """As `Shards`, for one GGUF file. Experts, which the file stacks, go by the names that they have one by one.

    `expert_types`: ggml types of the routed experts.
    """

    bits: int | None = None  # the types of its tensors say it one by one

    def __init__(self, source: Source) -> None:
        self.source = source
        self.path = Path(source.place)
        self.folder = self.path.parent
        self.paths = [self.path]
        self.twice: list[str] = []
        self.on_read: Callable[[int], None] | None = None
        self.expert_types: set[str] = set()
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in _read(source.flag, self.path)[1].items():
            self._add(name, tensor)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.stored = {name: tensor.size for name, tensor in self._tensors.items()}

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def read(self, name: str) -> torch.Tensor:
        """float32, or float16 as it stands."""
        from gguf import dequantize

        tensor = self._tensors[name]
        numbers = dequantize(self._bytes(tensor), tensor.type)
        return torch.from_numpy(np.ascontiguousarray(numbers)).view(tensor.shape)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Along the first dimension; experts are apart already."""
        yield from self.read(name)

    def blocks(self, name: str, format: str) -> torch.Tensor | None:
        """The rows' bytes [r, row bytes], if the tensor is in this format of a store."""
        tensor = self._tensors[name]
        if BLOCKS.get(tensor.type.name) != format:
            return None
        return torch.from_numpy(self._bytes(tensor))

    def close(self) -> None:
        """No file is kept open."""

    def _bytes(self, tensor: Tensor) -> np.ndarray:
        raw = np.fromfile(self.path, np.uint8, tensor.size, offset=tensor.offset)
        if len(raw) < tensor.size:
            raise InputError(f"{self.source.flag} {self.source.name}: the file ends too early; fetch it again")
        if self.on_read is not None:
            self.on_read(tensor.size)
        rows = int(np.prod(tensor.shape[:-1]))
        plain = {"F32": np.float32, "F16": np.float16}.get(tensor.type.name)
        return raw.view(plain).reshape(tensor.shape) if plain else raw.reshape(rows, -1)

    def _add(self, name: str, tensor: Tensor) -> None:
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        base = name.removesuffix(".weight")
        if match and match[2] in EXPERTS:
            self.expert_types.add(tensor.type.name)
            experts, *shape = tensor.shape
            size = tensor.size // experts
            for expert in range(experts):
                own = f"model.layers.{match[1]}.mlp.experts.{expert}.{EXPERTS[match[2]]}.weight"
                self._tensors[own] = Tensor(tensor.type, tuple(shape), tensor.offset + expert * size, size)
        elif match and match[2] in LAYER:
            self._tensors[f"model.layers.{match[1]}.{LAYER[match[2]]}.weight"] = tensor
        else:
            self._tensors[f"{TOP[base]}.weight" if base in TOP else name] = tensor


def find_gguf(flag: str, name: str, tokenizer: str | Path | None = None) -> Source:
    """Configuration and tokenizer of a GGUF file: a path, or OWNER/REPOSITORY/FILE of the hub.

    `tokenizer`: where to take it from instead. Raises InputError: no such file, or an architecture not read here.
    """
    path = _path(flag, name)
    fields, tensors = _read(flag, path)
    settings = _settings(flag, name, fields, tensors)
    try:
        config = AutoConfig.for_model(**settings)
        if tokenizer is None:
            found = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        else:
            found = AutoTokenizer.from_pretrained(str(tokenizer))
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{flag} {name}: its tokenizer cannot be read ({first}); give a folder with one as --tokenizer"
        ) from None
    return Source(flag, name, str(path), config, found)


def _path(flag: str, name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if name.count("/") == 2 and not name.startswith((".", "/", "~")):
        owner, repository, file = name.split("/")
        try:
            return Path(hf_hub_download(f"{owner}/{repository}", file))
        except (OSError, ValueError) as error:
            raise InputError(f"{flag} {name}: cannot be fetched ({error})") from None
    raise InputError(f"{flag} {name}: no such file; give a .gguf file, or OWNER/REPOSITORY/FILE.gguf of the hub")


@lru_cache(maxsize=4)  # parsing a real vocabulary takes seconds
def _read(flag: str, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata (without the vocabulary) and tensors of a file."""
    try:
        import gguf
    except ImportError:
        raise InputError(f"{flag} {path}: GGUF files need the gguf package; pip install 'moe-spac[gguf]'") from None
    try:
        reader = gguf.GGUFReader(path)
        fields = {k: f.contents() for k, f in reader.fields.items() if f.types[:1] != [gguf.GGUFValueType.ARRAY]}
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"{flag} {path}: cannot be read as GGUF ({error}); fetch it again") from None
    tensors = {
        t.name: Tensor(t.tensor_type, tuple(int(n) for n in reversed(t.shape)), int(t.data_offset), int(t.n_bytes))
        for t in reader.tensors
    }
    return fields, tensors


def _settings(flag: str, name: str, fields: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The configuration that the metadata describe."""
    kind = fields.get("general.architecture")
    families = {"qwen3moe": ("qwen3_moe", FIELDS | ROUTED), "qwen3": ("qwen3", FIELDS)}
    if kind not in families:
        raise InputError(f"{flag} {name}: GGUF files of {kind} are not read here, only qwen3moe and qwen3; {ADVICE}")
    if int(fields.get("split.count", 1)) > 1:
        raise InputError(f"{flag} {name}: this is a part of a split file; join them with llama-gguf-split --merge")
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")
    if scaling != "none":
        raise InputError(f"{flag} {name}: positions scaled by {scaling} are not read from GGUF here; {ADVICE}")
    family, keys = families[kind]
    absent = [key for key in keys.values() if f"{kind}.{key}" not in fields]
    if absent or "token_embd.weight" not in tensors:
        raise InputError(f"{flag} {name}: {kind}.{[*absent, 'token_embd.weight'][0]} is missing; {ADVICE}")
    settings = {field: fields[f"{kind}.{key}"] for field, key in keys.items()}
    if family == "qwen3_moe":
        settings["norm_topk_prob"] = True  # llama.cpp does it always for this architecture
    return settings | {
        "model_type": family,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.get(f"{kind}.rope.freq_base", 1e6)},
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "dtype": "bfloat16",
    }


ADVICE = "give the model's safetensors folder"
