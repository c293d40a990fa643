"""Memory at the peak of loading a checkpoint and after it: `python tests/benchmarks/load_peak.py [--quick] [--json]`.

Two checkpoints of random experts in a temporary folder: bfloat16 ones one by one in six shards, and stacked ones in
MXFP4, a layer of gpt-oss-20b's shape. Each is loaded into several stores, each time by a process of its own. MiB beside
what such a process takes once it has loaded the embedded pair; pages of a mapped store's file count while they are in
memory. Linux only: /proc says it. `--quick` loads small stacked experts into one store.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import family_model, save_tiny_tokenizer, tiny_config

from moe_spac.traces.console import show_json, show_table
from moe_spac.traces.models import quiet

EXPERTS, HIDDEN, WIDTH = 64, 512, 256  # one by one
STACKED = 2880  # hidden size and width of gpt-oss-20b
MEASURE = """
import sys
from pathlib import Path
from moe_spac.executor.models import load_models
from moe_spac.executor.stores import Choice
import moe_spac.executor.checkpoint
import transformers.models.gpt_oss.modeling_gpt_oss, transformers.models.qwen3_moe.modeling_qwen3_moe

def size(name):
    lines = dict(l.split(":") for l in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024

load_models()  # what is imported and allocated for any model
before = size("VmRSS")
format, memory, target, folder = sys.argv[1:]
models = load_models(target, dtype="auto", store=Choice(format, memory, Path(folder)))
print(size("VmHWM") - before, size("VmRSS") - before, models.store.size)
"""


@dataclass(frozen=True)
class Taken:
    """Bytes of the checkpoint's files, of the store, and of memory at the peak and after, beside a process's own."""

    checkpoint: int
    store: int
    peak: int
    after: int


def measure(target: Path, kind: str, memory: str) -> Taken:
    """Load a checkpoint into a store (`exact`, `q8` or `q4`; `ram` or `mmap`) by a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, "-c", MEASURE, kind, memory, str(target), folder]
        told = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True).stdout
    peak, after, store = map(int, told.split())
    return Taken(sum(f.stat().st_size for f in target.glob("*.safetensors")), store, peak, after)


def write_plain(folder: Path, layers: int) -> Path:
    """A Qwen3-MoE in bfloat16 with its experts one by one, a shard of 48 MiB a layer."""
    config = tiny_config(
        hidden_size=HIDDEN, num_hidden_layers=layers, num_experts=EXPERTS, moe_intermediate_size=WIDTH, dtype="bfloat16"
    )
    config.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    weight_map = {}
    up = torch.randn(WIDTH, HIDDEN).bfloat16()
    for layer in range(layers):
        path = f"model.layers.{layer}"
        tensors = {
            f"{path}.mlp.experts.{e}.{p}_proj.weight": up.clone() for e in range(EXPERTS) for p in ("gate", "up")
        }
        tensors |= {f"{path}.mlp.experts.{e}.down_proj.weight": up.T.contiguous() for e in range(EXPERTS)}
        shapes = {"self_attn.q_proj": (64, HIDDEN), "self_attn.k_proj": (32, HIDDEN), "self_attn.v_proj": (32, HIDDEN)}
        shapes |= {"self_attn.o_proj": (HIDDEN, 64), "mlp.gate": (EXPERTS, HIDDEN), "self_attn.q_norm": (16,)}
        shapes |= {"self_attn.k_norm": (16,), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        tensors |= {f"{path}.{name}.weight": torch.ones(shape).bfloat16() for name, shape in shapes.items()}
        if layer == 0:
            tensors |= {n: torch.ones(320, HIDDEN).bfloat16() for n in ("model.embed_tokens.weight", "lm_head.weight")}
            tensors["model.norm.weight"] = torch.ones(HIDDEN).bfloat16()
        save_file(tensors, folder / f"{layer}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{layer}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_stacked(folder: Path, width: int) -> Path:
    """A gpt-oss of one layer with 32 experts of `width` x `width` in MXFP4; everything else is bfloat16."""
    more = {"num_hidden_layers": 1, "num_local_experts": 1, "layer_types": ["full_attention"]}
    family_model("gpt_oss", hidden_size=width, intermediate_size=width, dtype="bfloat16", **more).save_pretrained(
        folder
    )
    save_tiny_tokenizer(folder)
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            groups = 32, weight.shape[2], width // 32
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(120, 124, groups, dtype=torch.uint8)
        else:
            one_each = ".experts." in name or ".router." in name
            tensors[name] = weight.bfloat16().repeat(32, *[1] * (weight.dim() - 1)) if one_each else weight.bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4"}, "num_local_experts": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def take(quick: bool, place: Path) -> Iterator[dict[str, Any]]:
    if quick:
        cases = [(write_stacked(place, 256), "stacked", [("q4", "mmap")])]
    else:
        one_by_one, stacked = place / "plain", place / "stacked"
        one_by_one.mkdir()
        stacked.mkdir()
        cases = [
            (write_plain(one_by_one, 6), "one by one", [("exact", "ram"), ("q4", "ram"), ("q8", "mmap")]),
            (write_stacked(stacked, STACKED), "stacked", [("exact", "ram"), ("q4", "mmap")]),
        ]
    for target, experts, stores in cases:
        for kind, memory in stores:
            yield {"experts": experts, "kept": f"{kind}, {memory}", **vars(measure(target, kind, memory))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="bytes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, quiet():
        rows = list(take(given.quick, Path(place)))
    if given.json:
        show_json(rows)
        return
    mib = [{k: v if isinstance(v, str) else f"{v / 2**20:,.0f}" for k, v in row.items()} for row in rows]
    show_table("MiB while a checkpoint is loaded and after", mib)


if __name__ == "__main__":
    main()
