"""Routing written a row at a time: CSV with a row for each chosen expert, JSON lines with a row for each layer.

Such files come from llama.cpp's moe-trace (`layer,expert`, ggml-org/llama.cpp#28544), from BigMoeOnEdge
(`turn,phase,step,layer,slot,expert,weight,...`, Helldez/BigMoeOnEdge#21) and from engines that log
`{"layer": 3, "token": 17, "ids": [...], "weights": [...]}`. Columns are found by name, never by place; a CSV without
names must have two (layer, expert), three (token before them) or four (weight after them).
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from .errors import InputError
from .schema import Kind
from .texts import Text

PLACES = {
    2: ["layer", "expert"],
    3: ["token", "layer", "expert"],
    4: ["token", "layer", "expert", "weight"],
}
OTHER_NAMES = {
    "step": "token",
    "token_idx": "token",
    "expert_id": "expert",
    "layer_id": "layer",
    "slot": "rank",
    "phase": "kind",
    "prob": "weight",
    "experts": "ids",
    "expert_ids": "ids",
    "probs": "weights",
    "sequence_id": "sequence",
}
KNOWN = ("sequence", "turn", "token", "layer", "rank", "expert", "weight", "kind")
LINES_AT_ONCE = 50_000


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of N rows; `ids` and `weights` are [N, w] (w is 1 in a CSV). `text` numbers the texts from 0.

    `complete`: a row has all experts of its token and layer.
    """

    layer: np.ndarray
    ids: np.ndarray
    weights: np.ndarray | None
    token: np.ndarray | None
    text: np.ndarray
    kind: np.ndarray | None
    complete: bool


def read_csv(src: Path, top_k: int | None) -> tuple[list[Text], tuple[int, ...]]:
    """Texts of a CSV, and the numbers of the layers it names. `top_k` is needed where no column tells tokens apart."""
    table = _table(src)
    missing = [name for name in ("layer", "expert") if name not in table]
    if missing:
        raise InputError(f"{src}: no column {missing[0]}; write a first line such as token,layer,expert")

    def whole(name: str) -> np.ndarray | None:
        return _integers(table[name], f"{src}: column {name}") if name in table else None

    layer, expert, token, rank = whole("layer"), whole("expert"), whole("token"), whole("rank")
    assert layer is not None
    assert expert is not None
    owners = [column if column is not None else np.zeros_like(layer) for column in (whole("sequence"), whole("turn"))]
    rows = Rows(
        layer=layer,
        ids=expert[:, None],
        weights=_numbers(table["weight"], f"{src}: column weight")[:, None] if "weight" in table else None,
        token=token,
        text=np.unique(np.stack(owners, axis=1), axis=0, return_inverse=True)[1].reshape(-1),
        kind=np.array(table["kind"].to_pylist()) if "kind" in table else None,
        complete=False,
    )
    if token is not None and rank is not None:
        keys = (rank, layer, token, rows.text)
        order = np.lexsort(keys)
        again = np.all([np.diff(key[order]) == 0 for key in keys], axis=0)
        if again.any():
            raise InputError(_joined(src, int(token[order[np.argmax(again)]])))
        rows = _chosen(rows, order)
    return _texts(rows, src, top_k)


def read_jsonl(src: Path) -> tuple[list[Text], tuple[int, ...]]:
    """The same of JSON lines, which have all experts of a token and layer together."""
    parts: list[dict[str, Any]] = []
    lines = objects(src)
    while chunk := list(islice(lines, LINES_AT_ONCE)):
        parts.append(_chunk(chunk, src))
    first = parts[0]
    if any(part.keys() != first.keys() or part["ids"].shape[1] != first["ids"].shape[1] for part in parts):
        raise InputError(f"{src}: its rows do not all have the same fields and as many experts")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in first}
    rows = Rows(
        layer=columns["layer"],
        ids=columns["ids"],
        weights=columns.get("weights"),
        token=columns.get("token"),
        text=np.unique(columns.get("sequence", np.zeros_like(columns["layer"])), return_inverse=True)[1],
        kind=columns.get("kind"),
        complete=True,
    )
    return _texts(rows, src, rows.ids.shape[1])


def _chunk(lines: list[tuple[int, dict[str, Any]]], src: Path) -> dict[str, np.ndarray]:
    renamed = [{OTHER_NAMES.get(name, name): value for name, value in fields.items()} for _, fields in lines]
    for (number, _), fields in zip(lines, renamed, strict=True):
        if not isinstance(fields.get("layer"), int) or not isinstance(fields.get("ids"), list) or not fields["ids"]:
            raise InputError(f'{src}: line {number} needs "layer", a number, and "ids", a list of experts')
    names = [name for name in ("layer", "ids", "weights", "token", "sequence", "kind") if name in renamed[0]]
    try:
        columns = {name: np.array([fields[name] for fields in renamed]) for name in names}
    except (KeyError, ValueError):
        columns = {}
    kinds = {"ids": "iu", "weights": "fiu", "kind": "U"}
    wrong = [name for name, values in columns.items() if values.dtype.kind not in kinds.get(name, "iu")]
    if not columns or wrong or columns.get("weights", columns["ids"]).shape != columns["ids"].shape:
        what = f"{wrong[0]} is not of one kind" if wrong else "rows differ in their fields or in how many experts"
        raise InputError(f"{src}: lines {lines[0][0]} to {lines[-1][0]}: {what}; write the same fields in each")
    return columns


def objects(src: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of JSON lines; blank lines are passed over. InputError if there is no object."""
    found = False
    try:
        with src.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    fields = json.loads(line)
                    if not isinstance(fields, dict):
                        raise InputError(f"{src}: line {number} is not an object; write one object a line")
                    found = True
                    yield number, fields
    except (OSError, ValueError) as error:
        raise InputError(f"{src}: not JSON lines ({error}); write one object a line") from None
    if not found:
        raise InputError(f"{src}: no rows in the file")


def _table(src: Path) -> dict[str, Any]:
    """Columns by name; comment lines (#) at the top are passed over."""
    try:
        content = src.read_bytes()
        start = 0
        while content.startswith(b"#", start):
            start = content.find(b"\n", start) + 1 or len(content)
        first = content[start:].split(b"\n", 1)[0].decode().strip().split(",")
        names = None if not all(_is_number(cell) for cell in first) else PLACES.get(len(first))
        if names is None and all(_is_number(cell) for cell in first):
            raise InputError(
                f"{src}: {len(first)} columns without names; write a first line such as token,layer,expert"
            )
        options = pc.ReadOptions(column_names=names) if names else pc.ReadOptions()
        table = pc.read_csv(io.BytesIO(memoryview(content)[start:]), read_options=options)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(f"{src}: cannot be read as CSV ({' '.join(str(error).split())})") from None
    if not len(table):
        raise InputError(f"{src}: no rows in the file")
    wanted = {}
    for name in table.column_names:
        clean = name.strip().lower()
        ours = clean if clean in KNOWN else OTHER_NAMES.get(clean, "")
        if ours in KNOWN and (ours not in wanted or clean == ours):
            wanted[ours] = table[name]
    return wanted


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _integers(column: Any, what: str) -> np.ndarray:
    if not pa.types.is_integer(column.type) or column.null_count:
        raise InputError(f"{what}: not a whole number in every row")
    return column.to_numpy().astype(np.int64)


def _numbers(column: Any, what: str) -> np.ndarray:
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)) or column.null_count:
        raise InputError(f"{what}: not a number in every row")
    return column.to_numpy().astype(np.float64)


def _texts(rows: Rows, src: Path, top_k: int | None) -> tuple[list[Text], tuple[int, ...]]:
    layers = np.unique(rows.layer)
    if layers[0] < 0:
        raise InputError(f"{src}: layer {layers[0]} is negative")
    found = []
    for text in range(int(rows.text.max()) + 1):
        mine = np.flatnonzero(rows.text == text)
        if len(mine):
            part = _chosen(rows, mine)
            name = f"{src.stem}-{len(found) + 1}"
            found.append(
                _by_pass(part, layers, src, name, top_k) if part.token is None else _by_token(part, layers, src, name)
            )
    return found, tuple(layers.tolist())


def _chosen(rows: Rows, places: np.ndarray) -> Rows:
    def of(column: np.ndarray | None) -> np.ndarray | None:
        return None if column is None else column[places]

    return Rows(
        rows.layer[places], rows.ids[places], of(rows.weights), of(rows.token), rows.text[places], of(rows.kind),
        rows.complete,
    )  # fmt: skip


def _joined(src: Path, token: int) -> str:
    return (
        f"{src}: token {token} comes twice in one layer; files that were joined need a column sequence, rows in any "
        "order a column rank"
    )


def _by_token(rows: Rows, layers: np.ndarray, src: Path, name: str) -> Text:
    """Rows that name their token, in any order; within a token and layer their order is the router's."""
    assert rows.token is not None
    key = rows.token * (layers[-1] + 1) + rows.layer
    runs = key if rows.complete else key[np.r_[True, np.diff(key) != 0]]
    once, counts = np.unique(runs, return_counts=True)
    if len(once) != len(runs):
        raise InputError(_joined(src, int(once[np.argmax(counts > 1)] // (layers[-1] + 1))))
    order = np.lexsort((rows.layer, rows.token))  # stable
    token, layer = rows.token[order], rows.layer[order]
    tokens, counts = np.unique(token, return_counts=True)
    each, rest = divmod(int(counts[0]), len(layers))
    if rest or (counts != counts[0]).any():
        odd = tokens[np.argmax(counts != np.bincount(counts).argmax())]
        raise InputError(
            f"{src}: token {odd} has not as many rows as the others; each needs every layer and as many experts"
        )
    grid = layer.reshape(len(tokens), len(layers), each)
    if (grid != layers[:, None]).any():
        odd = tokens[np.argmax((grid != layers[:, None]).any(axis=(1, 2)))]
        raise InputError(f"{src}: token {odd} has not as many experts in each layer")
    shape = (len(tokens), len(layers), each * rows.ids.shape[1])
    kinds = None
    if rows.kind is not None:
        kinds = _kinds(rows.kind[order].reshape(len(tokens), -1)[:, 0], src)
    weights = None if rows.weights is None else rows.weights[order].reshape(shape)
    return Text(name, rows.ids[order].reshape(shape), weights, kinds=kinds)


def _by_pass(rows: Rows, layers: np.ndarray, src: Path, name: str, top_k: int | None) -> Text:
    """Rows that name no token, in the order of computing: pass after pass, in it layer after layer, token after token.

    llama.cpp computes only the wanted tokens of a prompt in its last layer (none in all but the last pass): a token
    that is not in every layer is left out.
    """
    if top_k is None:
        raise InputError(f"{src}: no column token; give --top-k (or --model), so that tokens can be told apart")
    if len(layers) == 1:
        raise InputError(f"{src}: one layer and no column token; forward passes cannot be told apart, add the column")
    each = max(1, top_k // rows.ids.shape[1])
    begins = np.flatnonzero(np.r_[True, np.diff(rows.layer) != 0])
    ends = np.r_[begins[1:], len(rows.layer)]
    uneven = (ends - begins) % each != 0
    if uneven.any():
        at = int(np.argmax(uneven))
        raise InputError(
            f"{src}: {ends[at] - begins[at]} experts of layer {rows.layer[begins[at]]} from row {begins[at] + 1} are "
            f"not whole tokens of {top_k}; the file is cut, or --top-k is another"
        )
    starts = np.flatnonzero(np.r_[True, np.diff(rows.layer[begins]) < 0])
    places, passes, left_out = [], [], 0
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(begins)], strict=True):
        there = rows.layer[begins[first:last]]
        tokens = (ends[first:last] - begins[first:last]) // each
        if np.array_equal(there, layers):
            n = int(tokens.min())
            passes.append((Kind.DECODE if tokens.max() == 1 else Kind.PREFILL, n))
            rows_of = ends[first:last, None] - n * each + np.arange(n * each)
            places.append(rows_of.reshape(len(layers), n, each).swapaxes(0, 1))
            left_out += int(tokens.max()) - n
        elif np.array_equal(there, layers[:-1]) and last < len(begins):
            left_out += int(tokens.max())
        else:
            raise InputError(
                f"{src}: the pass from row {begins[first] + 1} on lacks some of the {len(layers)} layers; the file "
                "is cut, or not in the order of computing"
            )
    order = np.concatenate(places) if places else np.empty((0, len(layers), each), np.int64)
    shape = (len(order), len(layers), top_k)
    weights = None if rows.weights is None else rows.weights[order].reshape(shape)
    return Text(name, rows.ids[order].reshape(shape), weights, passes=passes, left_out=left_out)


def _kinds(values: np.ndarray, src: Path) -> list[str]:
    names = {"prefill": "prefill", "prompt": "prefill", "decode": "decode", "generate": "decode"}
    found = [names.get(str(value).lower(), "") for value in values.tolist()]
    if "" in found:
        raise InputError(f"{src}: kind {values[found.index('')]!r}; rows are of kind prefill or decode")
    return found
