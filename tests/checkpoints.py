"""Tiny checkpoints in the forms that people publish, made here from plain ones: FP8, GPTQ, GGUF."""

import json
import re
import shutil
from pathlib import Path

import numpy as np


def _rewrite(folder: Path, to: Path, tensors, settings=None) -> Path:
    from safetensors.torch import save_file

    shutil.copytree(folder, to, dirs_exist_ok=True)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    if settings:
        config["quantization_config"] = settings
    config["dtype"] = "bfloat16"
    (to / "config.json").write_text(json.dumps(config))
    return to


def save_fp8(folder: Path, to: Path, block: tuple[int, int]) -> tuple[Path, Path]:
    """The model with its projections in FP8 by blocks, and the plain model that this stands for."""
    import torch
    from safetensors.torch import load_file

    coded, plain = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim != 2 or "_proj" not in name:
            coded[name] = plain[name] = weight.bfloat16()
            continue
        rows, columns = block
        scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        bytes_, numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale[i, j] = weight[at].abs().max() / 448  # e4m3's largest number
                bytes_[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
                numbers[at] = bytes_[at].float() * scale[i, j]
        coded[name], coded[name + "_scale_inv"] = bytes_, scale
        plain[name] = numbers
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return _rewrite(folder, to / "fp8", coded, settings), _rewrite(folder, to / "plain", plain)


def save_gptq(folder: Path, to: Path, group: int, experts: bool = True) -> tuple[Path, Path]:
    """The same for GPTQ: 4 bits, eight in an int32, a scale and a zero point a group; `experts` False skips them."""
    import torch
    from safetensors.torch import load_file

    coded, plain = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim != 2 or "_proj" not in name or not (experts or ".experts." not in name):
            coded[name] = plain[name] = weight.bfloat16()
            continue
        base = name.removesuffix(".weight")
        turned = weight.T.contiguous()  # [in, out]
        groups = turned.view(-1, group, turned.shape[1])
        low, high = groups.amin(1), groups.amax(1)
        scale = ((high - low) / 15).half()
        zero = (-low / scale).round().clamp(1, 15).int()
        of = torch.arange(len(turned), dtype=torch.int32) // group
        quants = (turned / scale[of] + zero[of]).round().clamp(0, 15).int()
        coded[f"{base}.qweight"] = _eight(quants)
        coded[f"{base}.qzeros"] = _eight((zero - 1).T).T.contiguous()
        coded[f"{base}.scales"], coded[f"{base}.g_idx"] = scale, of
        plain[name] = ((quants - zero[of]) * scale[of].float()).T.contiguous()
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": False}
    return _rewrite(folder, to / "gptq", coded, settings), _rewrite(folder, to / "plain", plain)


def _eight(numbers):
    """[8r, c] of 0-15 to int32 [r, c], the first in the lowest bits."""
    import torch

    packed = torch.zeros(len(numbers) // 8, numbers.shape[1], dtype=torch.int64)
    for row in range(len(numbers)):
        packed[row // 8] |= numbers[row].long() << 4 * (row % 8)
    return torch.where(packed < 2**31, packed, packed - 2**32).int()


GGUF_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def save_gguf(folder: Path, to: Path, kind: str, expert_kinds: tuple[str, str, str] | None = None) -> tuple[Path, Path]:
    """A saved Qwen3 or Qwen3-MoE as GGUF with matrices of a ggml type, and the plain model that this stands for.

    Names are llama.cpp's converter's; `expert_kinds` are other types for gate, up and down of the experts. Written,
    quantised and dequantised by the gguf package.
    """
    import gguf
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    moe = config.model_type == "qwen3_moe"
    to.mkdir(parents=True, exist_ok=True)
    path = to / f"{config.model_type}-{kind}.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe" if moe else "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if moe:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    _add_tokenizer(writer, folder)
    plain, stacked = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        expert = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", name)
        own = kind if tensor.ndim == 2 and "mlp.gate." not in name else "F32"
        if expert and expert_kinds:
            own = expert_kinds[("gate", "up", "down").index(expert[3])]
        raw = gguf.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[own])
        plain[name] = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[own]).copy())
        if expert:
            stacked.setdefault((expert[1], expert[3], own), {})[int(expert[2])] = raw
        else:
            writer.add_tensor(_gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType[own])
    for (layer, part, own), by_number in stacked.items():
        whole = np.stack([by_number[e] for e in range(len(by_number))])
        writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", whole, raw_dtype=gguf.GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, _rewrite(folder, to / f"{path.stem}-plain", plain)


def _gguf_name(name: str) -> str:
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{GGUF_LAYER[rest]}.weight"


def _add_tokenizer(writer, folder: Path) -> None:
    import gguf

    saved = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(saved["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in saved["added_tokens"]}
    types = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for _, i in vocabulary]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in saved["model"]["merges"]])
    writer.add_eos_token_id(0)
