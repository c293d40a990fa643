"""All-cold decoding of a model of Qwen3-30B-A3B's shape on the CPU: ours against llama.cpp's, 4-bit weights in both.

Weights are random (GGUF's Q4_0, experts and dense alike), routing is what random routers choose. Each side decodes with
a few layers and with twice as many; the difference is the cost of a layer, and 48 of them are the model but its head:
so neither the vocabulary nor what a token costs beside its layers is in the comparison. Turns alternate, each run is a
process of its own, and medians over the steps of a run and the best of the runs are taken, as other processes only add.
Where they add all the time, the quickest step of all runs says more: the same from these is printed as well.

    python tests/benchmarks/bench_llama.py --llama-python /path/to/venv/bin/python
    python tests/benchmarks/bench_llama.py --split     ours on one thread: CPU time of products, and of all else
    python tests/benchmarks/bench_llama.py --full      ours alone with all 48 layers and the head: 19 GB of memory

The other Python needs llama-cpp-python; ours needs gguf to write the file (3 GB in --folder).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

HIDDEN, WIDTH, EXPERTS, TOP_K, LAYERS = 2048, 768, 128, 8, 48
HEADS, KV_HEADS, HEAD, VOCAB = 32, 4, 128, 151936
SMALL_VOCAB = 2048
PROMPT = list(range(10, 26))
NEEDED = 20 * 10**9  # bytes of free memory for the full model

LLAMA = """
import json, sys, time
import llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=512, n_threads=int(sys.argv[2]), n_threads_batch=int(sys.argv[2]),
                        verbose=False, use_mmap=False)
model.eval(list(range(10, 26)))
times = []
for i in range(int(sys.argv[3])):
    begin = time.perf_counter()
    model.eval([10 + i * 37 % 1000])
    times.append(time.perf_counter() - begin)
print(json.dumps(times))
"""


def four_bits(rows: int, columns: int, seed: int) -> Any:
    """Random Q4_0 bytes [rows, row bytes], uint8: values of deviation near 0.02."""
    import numpy as np

    raw = np.random.default_rng(seed).integers(0, 256, (rows, columns // 32, 18), np.uint8)
    raw[..., :2] = np.frombuffer(np.float16(0.0043).tobytes(), np.uint8)
    return raw.reshape(rows, -1)


def write_gguf(path: Path, layers: int) -> None:
    """Every layer has the same random matrices, in places of its own."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    out = GGUFWriter(path, "qwen3moe")
    out.add_context_length(4096)
    out.add_embedding_length(HIDDEN)
    out.add_block_count(layers)
    out.add_feed_forward_length(6144)
    out.add_expert_feed_forward_length(WIDTH)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_key_length(HEAD)
    out.add_value_length(HEAD)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(1e6)
    out.add_expert_count(EXPERTS)
    out.add_expert_used_count(TOP_K)
    out.add_vocab_size(SMALL_VOCAB)
    out.add_tokenizer_model("no_vocab")

    def packed(name: str, rows: int, columns: int, experts: int = 0) -> tuple[str, Any]:
        raw = four_bits(rows * max(1, experts), columns, rows + columns)
        return name, raw.reshape(experts, rows, -1) if experts else raw

    norm, head_norm = np.ones(HIDDEN, np.float32), np.ones(HEAD, np.float32)
    router = np.random.default_rng(1).standard_normal((EXPERTS, HIDDEN), np.float32) * 0.02
    one = [
        packed("attn_q", HEADS * HEAD, HIDDEN), packed("attn_k", KV_HEADS * HEAD, HIDDEN),
        packed("attn_v", KV_HEADS * HEAD, HIDDEN), packed("attn_output", HIDDEN, HEADS * HEAD),
        packed("ffn_gate_exps", WIDTH, HIDDEN, EXPERTS), packed("ffn_up_exps", WIDTH, HIDDEN, EXPERTS),
        packed("ffn_down_exps", HIDDEN, WIDTH, EXPERTS), ("attn_norm", norm), ("ffn_norm", norm),
        ("attn_q_norm", head_norm), ("attn_k_norm", head_norm), ("ffn_gate_inp", router),
    ]  # fmt: skip
    ends = [packed("token_embd", SMALL_VOCAB, HIDDEN), packed("output", SMALL_VOCAB, HIDDEN), ("output_norm", norm)]
    for name, data in [*ends, *((f"blk.{i}.{name}", data) for i in range(layers) for name, data in one)]:
        kind = GGMLQuantizationType.Q4_0 if data.dtype == np.uint8 else None
        out.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def our_models(layers: int, vocab: int) -> Any:
    """A model of transformers' own class on packed dense weights, and a store of random experts."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from moe_spac.executor.checkpoint import _compute_buffers
    from moe_spac.executor.dense import Packed
    from moe_spac.executor.formats import QUANTISED
    from moe_spac.executor.models import Models
    from moe_spac.executor.moe import IMPLEMENTATION, register
    from moe_spac.executor.pages import moved
    from moe_spac.executor.store import HostStore, Record
    from moe_spac.traces.models import Pair, model_shape, moe_blocks

    register()
    make: Any = Qwen3MoeConfig  # its head_dim is missing from the signature
    config = make(
        vocab_size=vocab, hidden_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD, intermediate_size=6144, moe_intermediate_size=WIDTH,
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True, max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    shape = model_shape(config, "random-30b-a3b")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, experts_implementation=IMPLEMENTATION).eval()
    for module in [m for m in model.modules() if "experts" not in type(m).__name__.lower()]:
        for name, weight in [(n, w) for n, w in module._parameters.items() if w is not None]:
            if isinstance(module, torch.nn.Linear):
                raw = torch.from_numpy(four_bits(*weight.shape, seed=len(weight)))
                packed: Any = Packed(moved(raw), QUANTISED["q4"], weight.shape[1])
                module._parameters[name] = packed
            else:
                filled = torch.ones(weight.shape) if weight.dim() == 1 else torch.randn(weight.shape) * 0.02
                module._parameters[name] = torch.nn.Parameter(filled, requires_grad=False)
    _compute_buffers(model, "cpu")
    record = Record(HIDDEN, WIDTH, QUANTISED["q4"], torch.float32)
    store = HostStore(layers, EXPERTS, record)
    one = torch.from_numpy(four_bits(record.size // 18, 32, seed=0)).flatten()
    for layer in range(layers):
        store.slab(layer)[:, : len(one)] = one
    return Models(Pair(model, None, None, shape, None, ()), store, moe_blocks(model), "")


def ours(layers: int, vocab: int, tokens: int) -> list[float]:
    """Seconds of each decode step through a session whose policy leaves every expert to the CPU."""
    from dataclasses import replace

    from moe_spac.executor.session import Session, Settings
    from moe_spac.policies.interface import Policy, Where
    from moe_spac.simulator.machine import load_machine
    from moe_spac.traces.schema import Kind
    from moe_spac.traces.speculate import Options

    class AllCold(Policy):
        name = "all-cold"

        def dispatch(self, demand: Any, view: Any) -> Any:
            return [(expert, Where.CPU) for expert in demand.experts]

    models = our_models(layers, vocab)
    stored = replace(models.pair.shape, expert_bytes=models.store.record.size)
    models = replace(models, pair=replace(models.pair, shape=stored))
    options = Options(max_new_tokens=tokens, draft_length=0)
    with Session(models, AllCold(), Settings(load_machine("rtx4060-laptop"), 0, options=options)) as session:
        answer = session.generate(PROMPT, options)
    return [step.wall_ns / 1e9 for step in answer.times if step.kind is Kind.DECODE]


def split(layers: int, vocab: int, tokens: int) -> dict[str, float]:
    """CPU ms a layer of one thread that does everything, ends included: median over the steps."""
    from time import thread_time_ns

    from moe_spac.executor import kernels
    from moe_spac.traces.lean import LeanModel

    spent, steps = {"products": 0}, []

    def timed(owner: Any, name: str, note: Any) -> Any:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            begin = thread_time_ns()
            result = inner(*args, **kwargs)
            note(thread_time_ns() - begin)
            return result

        return patch.object(owner, name, outer)

    def product(ns: int) -> None:
        spent["products"] += ns

    def step(ns: int) -> None:
        steps.append((spent["products"] / layers / 1e6, (ns - spent["products"]) / layers / 1e6))
        spent["products"] = 0

    watched = timed(kernels, "run", product), timed(kernels, "multiply", product), timed(LeanModel, "feed", step)
    with patch.dict(os.environ, SPAC_THREADS="1"), watched[0], watched[1], watched[2]:
        ours(layers, vocab, tokens)
    products, rest = (statistics.median(side) for side in zip(*steps[4:], strict=True))
    return {"products, CPU ms/layer": products, "all else, CPU ms/layer": rest}


def child(arguments: list[str], threads: int) -> list[float]:
    # Threads that spin after a product would take the cores of those that have the next one.
    env = os.environ | {"SPAC_THREADS": str(threads), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(arguments, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def typical(times: list[float]) -> float:
    return statistics.median(times[4:])


def rounds(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, int, list[float]]]:
    """Side, layers and seconds of each step, turn by turn."""
    few, many = options.layers, 2 * options.layers
    files = {n: folder / f"{n}.gguf" for n in (few, many)} if options.llama_python else {}
    for layers, path in files.items():
        write_gguf(path, layers)
    count, threads = str(options.tokens), options.threads
    for _ in range(options.repeats):
        for layers in (few, many):
            side = [sys.executable, __file__, "--child", str(layers), "--tokens", count]
            yield "ours", layers, child(side, threads)
            if files:
                side = [options.llama_python, "-c", LLAMA, str(files[layers]), str(threads), count]
                yield "llama.cpp", layers, child(side, threads)


def slopes(options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[tuple[str, int], list[list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for side, layers, times in rounds(options, Path(folder)):
            runs.setdefault((side, layers), []).append(times)
    found: dict[str, Any] = {}
    for name, of_run in (("", typical), (", quickest steps", min)):
        best = {key: min(map(of_run, times)) for key, times in runs.items()}
        found |= {f"{side} {layers} layers, ms{name}": 1e3 * s for (side, layers), s in best.items()}
        per_layer = {}
        for side in sorted({side for side, _ in best}):
            per_layer[side] = (best[side, 2 * options.layers] - best[side, options.layers]) / options.layers
            found[f"{side} ms/layer{name}"] = 1e3 * per_layer[side]
            found[f"{side} tokens/s of {LAYERS} layers{name}"] = 1 / (LAYERS * per_layer[side])
        if options.llama_python:
            found[f"ours over llama.cpp{name}"] = per_layer["llama.cpp"] / per_layer["ours"]
    return found


def full(options: argparse.Namespace) -> dict[str, Any]:
    available = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    if available < NEEDED:
        raise SystemExit(f"--full needs {NEEDED / 1e9:.0f} GB of free memory, there are {available / 1e9:.1f}")
    side = [sys.executable, __file__, "--child", str(LAYERS), "--vocab", str(VOCAB), "--tokens", str(options.tokens)]
    times = child(side, options.threads)
    return {"full model, ms/token": 1e3 * typical(times), "full model, tokens/s": 1 / typical(times)}


def why_not(python: str) -> str:
    """Why a Python cannot run llama.cpp; empty if it can."""
    try:
        done = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True)
    except OSError as error:
        return str(error.strerror)
    return "it cannot import llama_cpp" if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python; ours alone without")
    parser.add_argument("--layers", type=int, default=4, help="of the smaller model; the larger has twice as many")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="for the GGUF files; default: the system's for temporary files")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--vocab", type=int, default=SMALL_VOCAB, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(ours(options.child, options.vocab, options.tokens)))  # noqa: T201
        return 0
    if options.llama_python and (why := why_not(options.llama_python)):
        sys.stderr.write(f"error: --llama-python {options.llama_python}: {why}; name one that has llama-cpp-python\n")
        return 2
    if options.split:
        found = split(options.layers, options.vocab, options.tokens)
    else:
        found = full(options) if options.full else slopes(options)
    for name, value in found.items():
        print(f"{name:56s} {value:10.3f}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
