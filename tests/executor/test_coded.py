"""Checkpoints that are quantised already give the logits of the numbers that they stand for."""

import json
import shutil

import pytest
import torch
from checkpoints import save_fp8, save_gguf, save_gptq
from from_host import logits_of, reference_logits
from safetensors.torch import load_file, save_file
from tiny import save_tiny_draft, save_tiny_target
from transformers import AutoTokenizer

from moe_spac.executor.models import find_source, load_models
from moe_spac.executor.packed import shards_of
from moe_spac.executor.stores import Choice
from moe_spac.policies.interface import Key
from moe_spac.traces.errors import InputError


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Widths that blocks of 24 x 40 do not divide."""
    return save_tiny_target(tmp_path_factory.mktemp("coded") / "target")


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return save_tiny_draft(tmp_path_factory.mktemp("coded") / "draft")


def test_fp8_in_blocks_target_and_draft(target, draft, tmp_path):
    coded, plain = save_fp8(target, tmp_path / "t", (24, 40))
    coded_draft, plain_draft = save_fp8(draft, tmp_path / "d", (24, 40))
    models = load_models(coded, coded_draft)
    torch.testing.assert_close(logits_of(models), reference_logits(plain), rtol=0, atol=2e-5)
    torch.testing.assert_close(logits_of(models, models.pair.draft), reference_logits(plain_draft), rtol=0, atol=2e-5)
    assert load_models(coded, coded_draft, "auto").store.record.format.name == "bfloat16"


def test_fp8_goes_straight_to_eight_bits(target, tmp_path):
    """The 8-bit store is made from the decoded numbers, not from their rounding to bfloat16."""
    coded, _ = save_fp8(target, tmp_path / "t", (24, 40))
    store = load_models(coded, store=Choice("q8", "ram", tmp_path)).store
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    tensors = load_file(coded / "model.safetensors")
    factors = tensors[name + "_scale_inv"].repeat_interleave(24, 0)[:64].repeat_interleave(40, 1)[:, :32]
    numbers = tensors[name].float() * factors
    assert torch.equal(store.record.down(store.flat(Key(1, 5))), store.record.format.encode(numbers))
    assert all(0 < loss < 0.01 for loss in store.losses)


@pytest.mark.parametrize("name", ["weight_block_size", "quant_method"])
def test_codes_that_are_not_known_are_refused_by_name(name, target, tmp_path):
    coded, _ = save_fp8(target, tmp_path / "t", (24, 40))
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"][name] = None if name == "weight_block_size" else "awq"
    (coded / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"one factor for a whole matrix|quantised by 'awq'"):
        load_models(coded)


def test_gptq_in_four_bits(target, tmp_path):
    coded, plain = save_gptq(target, tmp_path, 16)
    torch.testing.assert_close(logits_of(load_models(coded)), reference_logits(plain), rtol=0, atol=2e-5)


def test_experts_that_were_not_quantised_are_noticed(target, tmp_path):
    """Reported of several quantisers: attention was, stacked experts were not, and the file is four times as large."""
    coded, _ = save_gptq(target, tmp_path, 16, experts=False)
    with pytest.raises(InputError, match=r"says 4 bits a weight, which makes 48\.00 KiB .* have 192\.00 KiB"):
        load_models(coded)


@pytest.mark.parametrize(("kind", "format"), [("Q8_0", "q8"), ("Q4_0", "q4"), ("F16", "float32")])
def test_gguf_target_and_draft(kind, format, target, draft, tmp_path):
    path, plain = save_gguf(target, tmp_path, kind)
    draft_path, plain_draft = save_gguf(draft, tmp_path, kind)
    models = load_models(path, draft_path)
    assert models.store.record.format.name == format
    assert set(models.store.losses) <= {0.0}
    torch.testing.assert_close(logits_of(models), reference_logits(plain), rtol=0, atol=2e-5)
    torch.testing.assert_close(logits_of(models, models.pair.draft), reference_logits(plain_draft), rtol=0, atol=2e-5)


def test_gguf_blocks_are_taken_as_they_are(target, tmp_path):
    """The record of an expert is gate's, up's and down's bytes of the file."""
    import gguf

    path, _ = save_gguf(target, tmp_path, "Q4_0")
    store = load_models(path).store
    tensors = {t.name: torch.from_numpy(t.data.copy()) for t in gguf.GGUFReader(path).tensors}
    gate, up, down = (tensors[f"blk.1.ffn_{part}_exps.weight"][5] for part in ("gate", "up", "down"))
    flat = store.flat(Key(1, 5))
    assert torch.equal(store.record.up(flat), torch.cat([gate, up]))
    assert torch.equal(store.record.down(flat), down)


def test_gguf_of_mixed_types_needs_a_word(target, tmp_path):
    path, plain = save_gguf(target, tmp_path, "Q8_0", ("Q4_0", "Q4_0", "Q5_0"))
    with pytest.raises(InputError, match=r"experts are in Q4_0 and Q5_0.*--store q8"):
        load_models(path)
    models = load_models(path, store=Choice("exact"))
    torch.testing.assert_close(logits_of(models), reference_logits(plain), rtol=0, atol=2e-5)
    again = load_models(path, store=Choice("q8", folder=tmp_path)).store
    assert all(0 < loss < 0.01 for loss in again.losses)


def test_gguf_tokenizer_from_the_file_or_a_folder(target, tmp_path):
    path, _ = save_gguf(target, tmp_path, "Q8_0")
    text = "the expert that the router chose"
    own = AutoTokenizer.from_pretrained(target)
    for given in (None, target):
        found = load_models(path, tokenizer=given).pair.tokenizer
        assert found.get_vocab() == own.get_vocab()
        assert found.decode(found.encode(text)) == text
    assert load_models(path).pair.stop_tokens == (0,)
    with pytest.raises(InputError, match="--tokenizer"):
        load_models(target, tokenizer=tmp_path / "none")


def test_gguf_files_that_cannot_be_used(target, tmp_path):
    path, _ = save_gguf(target, tmp_path, "Q8_0")
    content = path.read_bytes()
    (tmp_path / "short.gguf").write_bytes(content[:3000])
    with pytest.raises(InputError, match="cannot be read as GGUF"):
        load_models(tmp_path / "short.gguf")
    with pytest.raises(InputError, match="no such file"):
        load_models(tmp_path / "none.gguf")
    (tmp_path / "llama.gguf").write_bytes(content.replace(b"qwen3moe", b"llama4xx"))
    with pytest.raises(InputError, match="GGUF files of llama4xx are not read here"):
        load_models(tmp_path / "llama.gguf")


def test_mxfp4_experts_as_gpt_oss_has_them(tmp_path):
    """Two numbers of four bits a byte and an exponent for 32; decoded here by the table of the format's standard."""
    from tiny import family_model, save_tiny_tokenizer

    folder = tmp_path / "model"
    family_model("gpt_oss", hidden_size=64, intermediate_size=32).save_pretrained(folder)
    save_tiny_tokenizer(folder)
    shutil.copytree(folder, tmp_path / "plain")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])  # E2M1
    coded, plain = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            coded[name] = plain[name] = weight
            continue
        experts, inner, outer = weight.shape
        codes = torch.randint(0, 16, (experts, outer, inner // 32, 32), dtype=torch.uint8)
        exponents = torch.randint(120, 124, (experts, outer, inner // 32), dtype=torch.uint8)
        coded[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        coded[f"{name}_scales"] = exponents
        numbers = values[codes.long()] * 2.0 ** (exponents.float() - 127)[..., None]
        plain[name] = numbers.reshape(experts, outer, inner).transpose(1, 2).contiguous()
    save_file(coded, folder / "model.safetensors", {"format": "pt"})
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(logits_of(load_models(folder)), reference_logits(tmp_path / "plain"), rtol=0, atol=1e-5)
    files = shards_of(find_source("--target", folder, "target"))
    for name in (name for name in files.shapes if name.endswith("_proj")):
        pieces = list(files.pieces(name))  # one expert is decoded at a time
        assert [p.shape for p in pieces] == [plain[name].shape[1:]] * 8
        assert torch.equal(torch.stack(pieces).float(), plain[name])
