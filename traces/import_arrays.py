"""Routed-experts arrays [tokens, layers, k] as inference engines return them: .npy, .npz and JSON.

What the engines give (with a row less than the text has tokens: the last one generated is never fed back):
vLLM `CompletionOutput.routed_experts`, an array, and in its server's JSON `choices[i].routed_experts`, the base64 of
a .npy (vllm-project/vllm#28284, PrimeIntellect-ai/verifiers#1363); SGLang `meta_info.routed_experts`, the base64 of
int32 values without a shape (sgl-project/sglang#17434). Dense layers may be among the layers; their rows mean nothing.
"""

import base64
import binascii
import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError
from .schema import ModelShape
from .texts import Text

NAMES = ("routed_experts", "experts", "expert_ids", "topk_ids")
NPY = b"\x93NUMPY"


def read_numpy(src: Path) -> list[Text]:
    """The array of a .npy (one text), or the arrays of an .npz (a text each, with the array's name)."""
    try:
        with src.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            single = isinstance(loaded, np.ndarray)
            arrays = {src.stem: loaded} if single else {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{src}: cannot be read as numpy arrays ({error}); fetch or write it again") from None
    if not arrays:
        raise InputError(f"{src}: no array in the archive; give a [tokens, layers, k] array for each text")
    return [Text(name, _checked(array, f"{src}: array {name}")) for name, array in arrays.items()]


def texts_in(content: Any, src: Path, named: ModelShape | None) -> list[Text]:
    """Every text with routed experts in parsed JSON, in order. Prompt length and token ids are taken from beside it."""
    if isinstance(content, list) and content and isinstance(content[0], list):
        return [Text(src.stem, _checked(_listed(content, str(src)), str(src)))]
    found = []
    for number, (value, around) in enumerate(_records(content, {})):
        name = str(around.get("request_id") or around.get("id") or f"{src.stem}-{number + 1}")
        experts = _checked(_decoded(value, around, f"{src}: {name}", named), f"{src}: {name}")
        found.append(Text(name, experts, prompt_tokens=_prompt_length(around), tokens=_tokens(around, len(experts))))
    if not found:
        raise InputError(f"{src}: no routed experts in it (looked for {', '.join(NAMES)}); ask the engine for them")
    return found


def _records(content: Any, around: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Each value under one of NAMES, with all the fields around it (those further in go first)."""
    if isinstance(content, list):
        for item in content:
            yield from _records(item, around)
    elif isinstance(content, dict):
        fields = {**around, **content}
        for name in NAMES:
            if content.get(name) is not None:
                yield content[name], fields
                return
        for value in content.values():
            if isinstance(value, (dict, list)):
                yield from _records(value, fields)


def _decoded(value: Any, around: Mapping[str, Any], where: str, named: ModelShape | None) -> np.ndarray:
    if isinstance(value, list):
        return _listed(value, where)
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise InputError(f"{where}: routed experts are neither a list nor base64 text") from None
    if raw.startswith(NPY):
        try:
            return np.load(io.BytesIO(raw), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise InputError(f"{where}: its .npy content is damaged ({error})") from None
    if named is None:
        raise InputError(f"{where}: int32 values in base64 have no shape; name the model with --model")
    return _shaped(raw, around, where, named)


def _shaped(raw: bytes, around: Mapping[str, Any], where: str, named: ModelShape) -> np.ndarray:
    """int32 values as [tokens, layers, k], whether all layers or only those with experts were written."""
    if len(raw) % 4:
        raise InputError(f"{where}: {len(raw)} bytes are not whole int32 values")
    values = np.frombuffer(raw, "<i4")
    counts = dict.fromkeys((len(named.moe_layers), named.layers))
    fitting = [n for n in counts if len(values) % (n * named.top_k) == 0]
    stated = [n for name in ("prompt_tokens", "completion_tokens") if isinstance(n := around.get(name), int)]
    if len(stated) == 2:
        fitting = [n for n in fitting if sum(stated) - len(values) // (n * named.top_k) in (0, 1)]
    if len(fitting) != 1:
        raise InputError(
            f"{where}: {len(values)} values are not the choices of {named.top_k} experts in "
            f"{' or '.join(map(str, counts))} layers for whole tokens; name the model that was recorded with --model"
        )
    return values.reshape(-1, fitting[0], named.top_k)


def _listed(value: list[Any], where: str) -> np.ndarray:
    try:
        return np.array(value)
    except ValueError:
        raise InputError(f"{where}: lists of unequal lengths; each token needs every layer and each layer k") from None


def _checked(array: np.ndarray, where: str) -> np.ndarray:
    if array.dtype.kind not in "iu" or array.ndim != 3 or not array.size:
        raise InputError(
            f"{where}: {array.dtype} values of shape {array.shape}; routed experts are integers [tokens, layers, k]"
        )
    return array


def _prompt_length(around: Mapping[str, Any]) -> int | None:
    if isinstance(around.get("prompt_token_ids"), list):
        return len(around["prompt_token_ids"])
    stated = around.get("prompt_tokens")
    usage = around.get("usage")
    if stated is None and isinstance(usage, dict):
        stated = usage.get("prompt_tokens")
    return stated if isinstance(stated, int) and stated >= 0 else None


def _tokens(around: Mapping[str, Any], rows: int) -> np.ndarray | None:
    """Vocabulary ids of the rows, if prompt and output are both there and are as many (or one more)."""
    prompt, output = around.get("prompt_token_ids"), around.get("token_ids", around.get("output_ids"))
    if not isinstance(prompt, list) or not isinstance(output, list):
        return None
    ids = [*prompt, *output]
    whole = len(ids) - rows in (0, 1) and all(isinstance(i, int) for i in ids)
    return np.array(ids[:rows], np.int32) if whole else None
