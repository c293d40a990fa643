"""Converts routing that other programs recorded into traces: what a file is, who reads it, what the trace then says."""

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InputError
from .export import replacing
from .exported import read_exported
from .gpt_oss import import_fingerprints, import_gpt_oss
from .import_arrays import NAMES, read_numpy, texts_in
from .import_rows import objects, read_csv, read_jsonl
from .reader import MAGIC, OTHERS
from .schema import Header, ModelShape, Provenance, Step
from .shapes import ShapeFlags, named_shape, shape_of
from .texts import Text, check_texts, steps_of
from .writer import TraceWriter

READABLE = {b"PK\x03\x04": "npz", b"\x93NUMPY": "npy", b"PAR1": "parquet"}
SUFFIXES = ("csv", "json", "jsonl", "npy", "npz", "parquet")
NOT_STATED = "Which rows were prompt is not stated: all are taken for generated tokens."


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """`prompt_tokens`: rows of each text that are prompt, where the file does not say. `weights`: keep them."""

    shape: ShapeFlags = field(default_factory=ShapeFlags)
    prompt_tokens: int | None = None
    weights: bool = True


def import_routing(
    src: str | Path,
    out: str | Path,
    options: ImportOptions | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Header:
    """Convert the file `src` into the trace `out` and return its header. `progress` is told of tokens.

    Files that `spac-trace export` wrote come back as they were, with their own header. All others are "imported":
    their model is what `options` says. A file is told by its first bytes and refused if its name says otherwise, or
    if nothing here reads it. A run that fails leaves no file. Raises InputError naming file and place.
    """
    src, options = Path(src), options or ImportOptions()
    form = form_of(src)
    with replacing(out, src) as part:
        own = read_exported(src, form)
        if own is not None:
            header, steps = own
            if options.shape != ShapeFlags() or options.prompt_tokens is not None:
                raise InputError(f"{src}: an exported trace, which knows its model; leave out --model and the like")
            _write(part, src, header, steps, progress)
            return header
        return _import_other(src, form, part, options, progress)


def form_of(src: Path) -> str:
    """csv, json, jsonl, npy, npz or parquet, from the first bytes. InputError for anything else."""
    try:
        with src.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot read: {error.strerror}"
        raise InputError(f"{src}: {why}; give a file of routed experts") from None
    named = src.suffix.lower().removeprefix(".")
    form = _by_content(src, start, named)
    if named in SUFFIXES and named != form:
        what = form if form in READABLE.values() else "text"
        raise InputError(f"{src}: named .{named}, but by its first bytes it is {what}; give it its right name")
    return form


def _by_content(src: Path, start: bytes, named: str) -> str:
    if not start:
        raise InputError(f"{src}: the file is empty")
    if start.startswith(MAGIC):
        raise InputError(f"{src}: already a trace (or another Arrow stream); it needs no import")
    for magic, form in READABLE.items():
        if start.startswith(magic):
            return form
    for magic, what in OTHERS.items():
        if start.startswith(magic):
            raise InputError(f"{src}: {what}")
    if b"\0" in start:
        raise InputError(f"{src}: not a kind of file that can be imported: it begins with {start[:4].hex(' ')}")
    if start.lstrip()[:1] in (b"{", b"["):
        return named if named in ("json", "jsonl") else "jsonl" if b"}\n{" in start else "json"
    return "csv"


def _import_other(src: Path, form: str, out: Path, options: ImportOptions, progress: Callable[[int], None]) -> Header:
    if form == "parquet":
        raise InputError(f"{src}: a Parquet file that spac-trace export did not write; give CSV, JSON lines or arrays")
    if form == "npz" and _holds(src, "seq_offsets"):
        return import_gpt_oss(src, out, options.weights, progress)
    values = parsed(src) if form == "json" else []
    if any(isinstance(value, dict) and "router_data" in value for value in values):
        return import_fingerprints(src, values, out, options.weights, progress)
    named = named_shape(options.shape)
    texts, layers = _texts(src, form, values, named, options.shape)
    texts = _without_dense(texts, named)
    k = texts[0].experts.shape[2]
    if layers is None or len(layers) != texts[0].experts.shape[1]:
        layers = texts[0].experts.shape[1]
    shape = shape_of(named, options.shape, layers, k, str(src))
    check_texts(texts, shape, str(src))
    header = _header(src, form, texts, shape, options)
    _write(out, src, header, steps_of(_with_prompts(texts, options), header.weights), progress)
    return header


def _texts(
    src: Path, form: str, values: list[Any], named: ModelShape | None, flags: ShapeFlags
) -> tuple[list[Text], tuple[int, ...] | None]:
    """The texts in a file, and the numbers of their layers if it has them."""
    top_k = named.top_k if named is not None else flags.top_k
    layers = None
    if form == "csv":
        texts, layers = read_csv(src, top_k)
    elif form == "jsonl" and "layer" in (first := next(objects(src))[1]) and not set(NAMES[:1]) & first.keys():
        texts, layers = read_jsonl(src)
    elif form == "jsonl":
        texts = texts_in([fields for _, fields in objects(src)], src, named)
    elif form == "json":
        texts = texts_in(values[0] if len(values) == 1 else values, src, named)
    else:
        texts = read_numpy(src)
    shapes = {text.experts.shape[1:] for text in texts}
    if len(shapes) > 1:
        raise InputError(
            f"{src}: its texts are of different models: [layers, k] is {' and '.join(map(str, sorted(shapes)))}"
        )
    return texts, layers


def parsed(src: Path) -> list[Any]:
    """All values of a JSON file, of which some programs write several one after another."""
    decoder = json.JSONDecoder()
    try:
        text = src.read_text(encoding="utf-8")
        values, at = [], len(text) - len(text.lstrip())
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            values.append(value)
            at += len(text) - at - len(text[at:].lstrip())
    except (OSError, ValueError) as error:
        raise InputError(f"{src}: not JSON ({error}); fetch or write it again") from None
    return values


def _without_dense(texts: list[Text], named: ModelShape | None) -> list[Text]:
    """Engines that keep a row for every layer fill those of dense layers with nothing; they are cut out."""
    if named is not None and texts[0].experts.shape[1] == named.layers > len(named.moe_layers):
        for text in texts:
            text.experts = text.experts[:, named.moe_layers]
    return texts


def _with_prompts(texts: list[Text], options: ImportOptions) -> list[Text]:
    for text in texts:
        if text.prompt_tokens is None:
            text.prompt_tokens = options.prompt_tokens
    return texts


def _header(src: Path, form: str, texts: list[Text], shape: ModelShape, options: ImportOptions) -> Header:
    has_weights = all(text.weights is not None for text in texts)
    known = all(t.prompt_tokens is not None or t.passes is not None or t.kinds is not None for t in texts)
    notes = [] if known or options.prompt_tokens is not None else [NOT_STATED]
    left_out = sum(text.left_out for text in texts)
    if left_out:
        notes.append(f"{left_out} prompt tokens left out, which the source does not have in every layer.")
    if all(text.tokens is None for text in texts):
        notes.append("Token ids are not known (-1).")
    if any(text.passes is None for text in texts) and known:
        notes.append("Each prompt is one prefill step.")
    return Header(
        target=shape,
        provenance=Provenance.IMPORTED,
        source=f"{form} file {src.name}",
        sampling={"temperature": None, "seed": None},
        weights=has_weights and options.weights,
        sequences=tuple({"name": text.name, "domain": "", "prompt_tokens": text.prompt_tokens} for text in texts),
        tools={"moe-spac": version("moe-spac")},
        notes=" ".join(notes),
    )


def _write(out: Path, src: Path, header: Header, steps: Iterator[Step], progress: Callable[[int], None]) -> None:
    try:
        with TraceWriter(out, header) as writer:
            for step in steps:
                writer.append(step)
                progress(len(step))
    except ValueError as error:
        raise InputError(f"{src}: {error}") from None


def _holds(src: Path, name: str) -> bool:
    try:
        with src.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return name in archive.files
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return False
