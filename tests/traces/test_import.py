"""Import of routing that other programs recorded."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from trace_files import FIXTURES, random_step, small_header, write

from moe_spac.traces import open_trace
from moe_spac.traces.errors import InputError
from moe_spac.traces.gpt_oss import gpt_oss_20b, import_gpt_oss
from moe_spac.traces.importers import ImportOptions, import_routing
from moe_spac.traces.schema import Kind, Provenance
from moe_spac.traces.shapes import ShapeFlags

NUMBERS = ShapeFlags(experts=6, hidden=8, expert_width=4, dense_bytes=1000, kv_bytes=64)


def routing(tokens: int, layers: int = 2, k: int = 2, experts: int = 6, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, experts)), axis=-1)[..., :k]


def imported(src: Path, shape: ShapeFlags = NUMBERS, **more):
    """Header and steps of the trace that a file becomes."""
    out = src.with_name("out.spac")
    import_routing(src, out, ImportOptions(shape, **more))
    trace = open_trace(out, strict=True)
    return trace.header, list(trace.steps())


def ids_of(steps) -> np.ndarray:
    return np.concatenate([step.experts for step in steps])


def npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


@pytest.mark.parametrize("suffix", ["npy", "npz", "json"])
def test_an_array_of_routed_experts(tmp_path, suffix):
    """O13: int [tokens, layers, k], as vLLM's CompletionOutput has it."""
    ids = routing(5).astype(np.int32)
    src = tmp_path / f"a.{suffix}"
    if suffix == "npy":
        np.save(src, ids)
    elif suffix == "npz":
        np.savez(src, a=ids)
    else:
        src.write_text(json.dumps(ids.tolist()))
    header, steps = imported(src, prompt_tokens=3)
    assert [(s.kind, len(s)) for s in steps] == [(Kind.PREFILL, 3), (Kind.DECODE, 1), (Kind.DECODE, 1)]
    assert np.array_equal(ids_of(steps), ids)
    assert [s.positions.tolist() for s in steps] == [[0, 1, 2], [3], [4]]
    assert header.provenance is Provenance.IMPORTED
    assert (header.target.expert_bytes, header.target.moe_layers, header.target.top_k) == (3 * 8 * 4 * 2, (0, 1), 2)
    header, steps = imported(src)
    assert {s.kind for s in steps} == {Kind.DECODE}
    assert "Which rows were prompt is not stated" in header.notes


def test_arrays_of_an_archive_are_texts_of_their_own(tmp_path):
    np.savez(tmp_path / "a.npz", first=routing(2), second=routing(3, seed=1))
    header, steps = imported(tmp_path / "a.npz")
    assert [s["name"] for s in header.sequences] == ["first", "second"]
    assert [s.sequence for s in steps] == [0, 0, 1, 1, 1]
    assert [int(s.positions[0]) for s in steps] == [0, 1, 0, 1, 2]


def test_a_response_of_vllm(tmp_path):
    """Base64 of a .npy for each choice; the row of the last generated token is not there."""
    ids = routing(5).astype(np.uint8)
    choice = {"index": 0, "token_ids": [21, 22, 23], "routed_experts": base64.b64encode(npy(ids)).decode()}
    (tmp_path / "r.json").write_text(
        json.dumps({"id": "cmpl-1", "prompt_token_ids": [11, 12, 13], "choices": [choice]})
    )
    header, steps = imported(tmp_path / "r.json")
    assert np.array_equal(ids_of(steps), ids)
    assert [(s.kind, s.tokens.tolist()) for s in steps] == [
        (Kind.PREFILL, [11, 12, 13]),
        (Kind.DECODE, [21]),
        (Kind.DECODE, [22]),
    ]
    assert header.sequences[0] == {"name": "cmpl-1", "domain": "", "prompt_tokens": 3}


@pytest.mark.parametrize("layers", [2, 3])
def test_responses_of_sglang_one_a_line(tmp_path, layers):
    """Base64 of int32 without a shape, for the layers with experts (1 and 2 of 3) or for all three."""
    texts = [routing(4, layers, seed=seed).astype("<i4") for seed in (1, 2)]
    for text in texts:
        if layers == 3:
            text[:, 0] = 0  # the dense layer
    with (tmp_path / "r.jsonl").open("w") as file:
        for text in texts:
            meta = {
                "prompt_tokens": 2,
                "completion_tokens": 3,
                "routed_experts": base64.b64encode(text.tobytes()).decode(),
            }
            file.write(json.dumps({"text": "hi", "meta_info": meta}) + "\n")
    header, steps = imported(tmp_path / "r.jsonl", ShapeFlags(model=str(FIXTURES / "v1.spac")))
    assert np.array_equal(ids_of(steps), np.concatenate([t[:, -2:] for t in texts]))
    assert [len(s) for s in steps] == [2, 1, 1, 2, 1, 1]
    assert header.target == open_trace(FIXTURES / "v1.spac").header.target
    with pytest.raises(InputError, match="have no shape; name the model with --model"):
        imported(tmp_path / "r.jsonl")


TOKENS = [[[3, 0], [5, 1]], [[3, 2], [5, 0]], [[1, 2], [4, 0]]]


def csv_rows(*columns: str) -> str:
    """The rows of TOKENS in layers 1 and 2, with these columns."""
    lines = []
    for token, layers in enumerate(TOKENS):
        for at, ids in enumerate(layers):
            for rank, expert in enumerate(ids):
                values = {"token": token, "layer": at + 1, "expert": expert, "weight": 0.75 - 0.5 * rank, "slot": rank}
                values |= {"step": token, "phase": "prefill" if token < 2 else "decode", "turn": 0, "residency": "miss"}
                lines.append(",".join(str(values[name]) for name in columns))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    "columns", [("layer", "expert"), ("token", "layer", "expert"), ("token", "layer", "expert", "weight")]
)
def test_csv_with_and_without_names_and_tokens(tmp_path, columns, named):
    """llama.cpp's `layer,expert`, one row for each choice, and what others add to it."""
    src = tmp_path / "t.csv"
    src.write_text((",".join(columns) + "\n" if named else "") + csv_rows(*columns))
    header, steps = imported(src, ShapeFlags(model=str(FIXTURES / "v1.spac")))
    assert ids_of(steps).tolist() == TOKENS
    assert [len(s) for s in steps] == [1, 1, 1]
    assert header.weights == ("weight" in columns)
    if header.weights:
        assert steps[0].weights is not None
        assert steps[0].weights.tolist() == [[[0.75, 0.25]] * 2]
    assert imported(src, ShapeFlags(**{**vars_of(NUMBERS), "top_k": 2}))[0].target.moe_layers == (1, 2)


def vars_of(flags: ShapeFlags) -> dict:
    return {name: getattr(flags, name) for name in ShapeFlags.__dataclass_fields__}


def test_columns_are_found_by_name_and_comments_passed_over(tmp_path):
    """The route trace of BigMoeOnEdge; its prompt rows become one prefill step."""
    columns = ("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency")
    shuffled = csv_rows(*columns).splitlines()[::-1]  # rank and token put them in order again
    text = "# route_trace v1\n# model=x\n" + ",".join(columns) + "\n" + "\n".join(shuffled) + "\n"
    (tmp_path / "t.csv").write_text(text)
    header, steps = imported(tmp_path / "t.csv")
    assert [(s.kind, len(s)) for s in steps] == [(Kind.PREFILL, 2), (Kind.DECODE, 1)]
    assert ids_of(steps).tolist() == TOKENS
    assert header.weights


@pytest.mark.parametrize("columns", [("token", "layer", "expert"), ("token", "layer", "slot", "expert")])
def test_files_joined_without_a_sequence_column_are_refused(tmp_path, columns):
    """Two equal files joined would look like one of twice the experts a token."""
    src = tmp_path / "t.csv"
    src.write_text(",".join(columns) + "\n" + csv_rows(*columns) + csv_rows(*columns).replace(",3", ",4"))
    with pytest.raises(InputError, match="token 0 comes twice in one layer"):
        imported(src)
    rows = [{"token": t, "layer": a, "ids": ids} for t, token in enumerate(TOKENS) for a, ids in enumerate(token)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, sorted(rows * 2, key=lambda r: r["token"]))))
    with pytest.raises(InputError, match="token 0 comes twice in one layer"):
        imported(tmp_path / "t.jsonl")
    both = [{**row, "sequence": 10**9 * n} for n in (1, 2) for row in rows]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, both)))
    assert [s.sequence for s in imported(tmp_path / "t.jsonl")[1]] == [0, 0, 0, 1, 1, 1]


def test_llama_cpp_writes_a_pass_layer_after_layer(tmp_path):
    """A prompt of three tokens is one pass (n*k rows of each layer); its last layer has the last token only, and none
    in a pass that gives no output.
    """
    rows = [(1, 0), (1, 1), (1, 2), (1, 3)]  # two tokens, nothing of them in layer 2
    rows += [(1, 3), (1, 0), (1, 3), (1, 2), (2, 5), (2, 0)]  # two tokens, one of them in layer 2
    rows += [(1, 1), (1, 2), (2, 4), (2, 0)]  # decode
    src = tmp_path / "t.csv"
    src.write_text("layer,expert\n" + "".join(f"{a},{b}\n" for a, b in rows))
    header, steps = imported(src, ShapeFlags(model=str(FIXTURES / "v1.spac")))
    assert [(s.kind, s.experts.tolist()) for s in steps] == [
        (Kind.PREFILL, [[[3, 2], [5, 0]]]),
        (Kind.DECODE, [[[1, 2], [4, 0]]]),
    ]
    assert "3 prompt tokens left out" in header.notes
    for cut, what in ((-1, "not whole tokens of 2"), (-2, "lacks some of the 2 layers")):
        src.write_text("".join(f"{a},{b}\n" for a, b in rows[:cut]))
        with pytest.raises(InputError, match=what):
            imported(src, ShapeFlags(model=str(FIXTURES / "v1.spac")))
    with pytest.raises(InputError, match="no column token; give --top-k"):
        imported(src)


def test_json_rows(tmp_path):
    """`{"layer", "token", "ids", "weights"}`, layer by layer as an engine computes a batch."""
    lines = [
        {"layer": layer, "token": token, "ids": TOKENS[token][layer], "weights": [0.5, 0.25]}
        for layer in range(2)
        for token in range(3)
    ]
    src = tmp_path / "t.jsonl"
    src.write_text("\n".join(map(json.dumps, lines)))
    header, steps = imported(src)
    assert ids_of(steps).tolist() == TOKENS
    assert header.weights
    assert not imported(src, weights=False)[0].weights
    src.write_text("\n".join(json.dumps({**line, "ids": line["ids"][: 1 + (i < 5)]}) for i, line in enumerate(lines)))
    with pytest.raises(InputError, match="lines 1 to 6: rows differ"):
        imported(src)
    src.write_text("\n".join(map(json.dumps, lines[:-1])))
    with pytest.raises(InputError, match="token 2 has not as many rows"):
        imported(src)


def test_512_experts_with_top_10(tmp_path):
    np.save(tmp_path / "a.npy", routing(20, 3, 10, 512))
    header, steps = imported(tmp_path / "a.npy", ShapeFlags(**{**vars_of(NUMBERS), "experts": 512}))
    assert ids_of(steps).dtype == np.uint16
    assert np.array_equal(ids_of(steps), routing(20, 3, 10, 512))
    assert ids_of(steps).max() > 255
    assert header.target.top_k == 10


def test_model_from_a_config_and_its_overrides(tmp_path):
    from tiny import tiny_config

    tiny_config().save_pretrained(tmp_path)
    np.save(tmp_path / "a.npy", routing(3, 2, 2, 8))
    for place in (tmp_path, tmp_path / "config.json"):
        target = imported(tmp_path / "a.npy", ShapeFlags(model=str(place), dtype="bfloat16"))[0].target
        assert (target.experts, target.hidden, target.expert_width) == (8, 64, 32)
        assert (target.dtype, target.expert_bytes) == ("bfloat16", 3 * 64 * 32 * 2)
    target = imported(tmp_path / "a.npy", ShapeFlags(model=str(tmp_path), dtype="int4", expert_bytes=3500))[0].target
    assert (target.dtype, target.expert_bytes) == ("int4", 3500)


def test_model_by_a_name_that_needs_no_network(tmp_path):
    np.save(tmp_path / "a.npy", routing(2, 48, 8, 128))
    target = imported(tmp_path / "a.npy", ShapeFlags(model="qwen3-30b-a3b"))[0].target
    assert (target.experts, target.expert_bytes) == (128, 3 * 2048 * 768 * 2)


@pytest.mark.parametrize(
    ("array", "flags", "what"),
    [
        (routing(3), ShapeFlags(experts=6), "or --hidden, --expert-width, --dense-size, --kv-size"),
        (routing(3), ShapeFlags(top_k=4), "has 2 experts a token, not the 4 of --top-k"),
        (routing(3), ShapeFlags(model="gpt-oss-20b"), "has 2 layers, but the model has 24"),
        (routing(3, 24, 2), ShapeFlags(model="gpt-oss-20b"), "has 2 experts a token, but the model chooses 4"),
        (routing(3), ShapeFlags(model="./none.json"), "--model ./none.json: no such file"),
        (routing(3) + 1, NUMBERS, r"token \d, layer \d: expert id 6, but the model has 6 experts"),
        (routing(3) - 1, NUMBERS, "expert id -1, but routing of that token is missing"),
        (np.zeros((3, 2, 2), int), NUMBERS, "an expert is chosen twice"),
        (np.zeros((3, 2)), NUMBERS, r"float64 values of shape \(3, 2\)"),
        (np.zeros((0, 2, 2), int), NUMBERS, "routed experts are integers"),
    ],
)
def test_arrays_that_do_not_fit_write_nothing(tmp_path, array, flags, what):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(InputError, match=what):
        import_routing(tmp_path / "a.npy", tmp_path / "t.spac", ImportOptions(flags))
    assert [p.name for p in tmp_path.iterdir()] == ["a.npy"]


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.npy", "t.bin"])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\x28\xb5\x2f\xfd rest", "zstd-compressed"),
        (b"\x1f\x8b\x08 rest", "gzip-compressed"),
        (b"\xfd7zXZ rest", "xz-compressed"),
        (b"BZh rest", "bzip2-compressed"),
        (b"ARROW1 rest", "an Arrow file"),
        (b"\xff\xff\xff\xff rest", "already a trace"),
        (b"\0\1\2\3 rest", "begins with 00 01 02 03"),
        (b"", "the file is empty"),
    ],
)
def test_other_files_are_refused_by_what_they_are(tmp_path, name, content, what):
    """O13: a compressed file is never read as rows."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=what):
        imported(tmp_path / name)


def test_a_name_that_is_wrong_is_said(tmp_path):
    for name, content, what in (
        ("a.csv", npy(routing(2)), "named .csv, but by its first bytes it is npy"),
        ("a.npy", b"layer,expert\n1,2\n", "named .npy, but by its first bytes it is text"),
        ("a.npz", b"PAR1 rest", "named .npz, but by its first bytes it is parquet"),
        ("a.parquet", b"PAR1 rest", "a.parquet"),
        ("a.npz", b"PK\x03\x04 rest", "cannot be read as numpy|cut, damaged"),
        ("a.json", b"{", "not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 is not an object"),
        ("a.csv", b"a,b\n1,2\n", "no column layer"),
        ("a.csv", b"1,2,3,4,5\n", "5 columns without names"),
        ("a.csv", b"layer,expert\n1,x\n", "column expert: not a whole number"),
        ("a.json", b'{"text": "no"}', "no routed experts in it"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=what):
            imported(tmp_path / name, ShapeFlags(**{**vars_of(NUMBERS), "top_k": 2}))
        (tmp_path / name).unlink()
    with pytest.raises(InputError, match="no such file"):
        imported(tmp_path / "none.csv")


def test_an_export_knows_its_model(tmp_path):
    from moe_spac.traces.export import export

    header = small_header()
    trace = open_trace(write(tmp_path / "t.spac", header, [random_step(np.random.default_rng(0), header)]))
    export(trace, tmp_path / "t.csv")
    with pytest.raises(InputError, match="leave out --model"):
        imported(tmp_path / "t.csv")
    assert imported(tmp_path / "t.csv", ShapeFlags())[0].provenance is Provenance.SYNTHETIC


def fingerprint(position: int, ids: np.ndarray, **more) -> dict:
    """A record as github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting publishes them."""
    layers = [
        {
            f"layer_{at}": {"selected_experts": row.tolist(), "selected_probs": [0.5, 0.25, 0.125, 0.125]}
            for at, row in enumerate(token)
        }
        for token in ids
    ]
    entries = [{f"token_{position + t}": layer} for t, layer in enumerate(layers)]
    return {
        "row_index": 7,
        "dataset": "mmlu",
        "category": "c",
        "finished_successfully": True,
        "router_data": entries,
    } | more


@pytest.mark.parametrize("joined", ["\n", None])
def test_published_fingerprints(tmp_path, joined):
    """One record, or several one after another, in a `*_examples.json`."""
    texts = [routing(n, 24, 4, 32, seed=n) for n in (2, 3)]
    records = [fingerprint(10 * len(ids), ids) for ids in texts]
    dumped = [json.dumps(record, indent=1) for record in records]
    (tmp_path / "a.json").write_text(
        joined.join(dumped) if joined else json.dumps(records)[1:-1].replace('}, {"row', '}{"row')
    )
    header, steps = imported(tmp_path / "a.json", ShapeFlags())
    assert np.array_equal(ids_of(steps), np.concatenate(texts))
    assert [int(s.positions[0]) for s in steps] == [20, 21, 30, 31, 32]
    assert header.target == gpt_oss_20b()
    assert steps[0].weights is not None
    assert steps[0].weights[0, 0].tolist() == [0.5, 0.25, 0.125, 0.125]
    records[0]["router_data"].reverse()
    (tmp_path / "a.json").write_text(json.dumps(records[0]))
    with pytest.raises(InputError, match="not one after another"):
        imported(tmp_path / "a.json", ShapeFlags())


def test_the_first_tokens_of_a_published_file_are_in_the_bundled_trace():
    """data/mmlu_pro_test/biology/True_False_examples.json, the first layers of tokens 183 and 184, read by hand."""
    first, second = (step for step, _ in zip(open_trace("gpt-oss-20b").steps(), range(2), strict=False))
    assert first.experts[0, :3].tolist() == [[31, 21, 22, 6], [18, 29, 12, 9], [29, 8, 4, 31]]
    assert second.experts[0, :2].tolist() == [[4, 9, 5, 3], [19, 28, 11, 10]]
    assert int(first.positions[0]) == 183


def archive(folder: Path, lengths: tuple[int, ...] = (3, 2), **changes) -> Path:
    """A small archive as the source has them; `changes` replace arrays or, as `meta`, the records."""
    rng = np.random.default_rng(0)
    tokens = sum(lengths)
    arrays = {
        "expert_ids": np.argsort(rng.random((tokens, 24, 32)), axis=-1)[..., :4].astype(np.uint8),
        "expert_probs_u8": rng.integers(0, 256, (tokens, 24, 4)).astype(np.uint8),
        "seq_offsets": np.r_[0, np.cumsum(lengths)],
    }
    meta = [
        {"dataset": "mmlu", "category": f"c{i}", "row_index": 7, "first_position": 10 * i + 5, "tokens": n}
        for i, n in enumerate(lengths)
    ]
    meta = changes.pop("meta", meta)
    np.savez(folder / "a.npz", **{name: value for name, value in {**arrays, **changes}.items() if value is not None})
    (folder / "a_meta.jsonl").write_text("".join(json.dumps(record) + "\n" for record in meta))
    return folder / "a.npz"


@pytest.mark.parametrize("weights", [True, False])
def test_rows_become_decode_steps(tmp_path, weights):
    src = archive(tmp_path)
    import_gpt_oss(src, tmp_path / "t.spac", weights)
    trace = open_trace(tmp_path / "t.spac", strict=True)
    steps = list(trace.steps())
    source = np.load(src)
    assert np.array_equal(np.concatenate([s.experts for s in steps]), source["expert_ids"])
    assert [s.sequence for s in steps] == [0, 0, 0, 1, 1]
    assert [int(s.positions[0]) for s in steps] == [5, 6, 7, 15, 16]
    assert {s.kind for s in steps} == {Kind.DECODE}
    assert all(s.tokens.tolist() == [-1] for s in steps)
    assert trace.header.provenance is Provenance.IMPORTED
    assert [s["name"] for s in trace.header.sequences] == ["mmlu/c0/7", "mmlu/c1/7"]
    assert "not known (-1)" in trace.header.notes
    stored = [s.weights for s in steps if s.weights is not None]
    assert len(stored) == (5 if weights else 0)
    if weights:
        assert np.concatenate(stored) == pytest.approx(source["expert_probs_u8"] / 255, abs=1e-3)


def test_model_sizes_are_those_published():
    """20,914,757,184 parameters and a checkpoint of 12.8 GiB (model card)."""
    model = gpt_oss_20b()
    biases = 2 * 2880 + 2880
    expert_weights = (model.expert_bytes - 2 * biases) * 8 / 4.25 + biases
    assert 24 * 32 * expert_weights + model.dense_bytes / 2 == 20_914_757_184
    assert (model.all_expert_bytes + model.dense_bytes) / 2**30 == pytest.approx(12.8, abs=0.05)
    assert (model.expert_bytes, model.kv_bytes_per_token) == (13_236_480, 49_152)


def test_bundled_trace_is_the_model_and_small():
    trace = open_trace("gpt-oss-20b")
    summary = trace.summary()
    assert trace.header.target == gpt_oss_20b()
    assert (summary.tokens, summary.sequences, summary.state) == (57_499, 165, "complete")
    assert summary.file_bytes <= 6_000_000
    assert trace.header.provenance is Provenance.IMPORTED


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"expert_ids": None}, "not a gpt-oss-20b routing archive"),
        ({"expert_ids": np.zeros((5, 24, 4), np.uint8)}, "names an expert twice"),
        ({"expert_ids": np.full((5, 24, 4), 32, np.uint8)}, r"of 0\.\.31"),
        ({"expert_ids": np.zeros((5, 2, 4), np.uint8)}, r"must be \[tokens, 24, 4\]"),
        ({"seq_offsets": np.array([0, 3])}, "seq_offsets must rise"),
        ({"meta": []}, r"a_meta\.jsonl: its records do not describe the 2 sequences"),
        ({"meta": [3]}, r"a_meta\.jsonl: cannot read"),
    ],
)
def test_wrong_archives_are_refused_and_write_nothing(tmp_path, changes, what):
    src = archive(tmp_path, **changes)
    with pytest.raises(InputError, match=what):
        import_gpt_oss(src, tmp_path / "t.spac")
    assert not (tmp_path / "t.spac").exists()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"a\.npz: no such file"):
        import_gpt_oss(tmp_path / "a.npz", tmp_path / "t.spac")
    src = archive(tmp_path)
    (tmp_path / "a_meta.jsonl").unlink()
    with pytest.raises(InputError, match=r"a_meta\.jsonl: no such file"):
        import_gpt_oss(src, tmp_path / "t.spac")
    src.write_text("text")
    with pytest.raises(InputError, match=r"a\.npz: not a gpt-oss-20b routing archive"):
        import_gpt_oss(src, tmp_path / "t.spac")
