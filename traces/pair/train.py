"""Train the embedded pair: a small Qwen3-MoE target and a smaller dense Qwen3 draft.

    python -m moe_spac.traces.pair.train tokenizer --corpus DIR --work W
    python -m moe_spac.traces.pair.train fit --work W --steps 3000      (again: continues)
    python -m moe_spac.traces.pair.train distill --work W --rounds 120  (again: continues)
    python -m moe_spac.traces.pair.train export --work W -o traces/pair

DIR holds the six text files named in `CORPUS`; where they come from is in `README.md` beside this file. The last
3 % of every domain is never trained on: prompts and the reported losses come from it. The draft learns from
the target's own distribution on the same batches while the target learns from the text, and then, the target being
frozen, on text that the target itself writes, which is what it will have to guess.
"""

import argparse
import gzip
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

CORPUS = {
    "drama": "tinyshakespeare.txt.gz",
    "scripture": "kjv_2mb.txt.gz",
    "arithmetic": "gsm8k_train.txt.gz",
    "code": "python311_stdlib.txt.gz",
    "manual": "python311_docs_rst.txt.gz",
    "exam": "mmlu_pro_cot_by_domain.jsonl.gz",
}
HELD_OUT = 0.03
VOCAB, ROW, BATCH = 2048, 256, 4
PEAK_LR, DECAY_SHARE, WARM_UP = 2.5e-3, 0.35, 150
BALANCE, DRAFT_KL = 0.004, 0.8
# Qwen3-4B's tokenizer marks turns the same way, so chat templates written for Qwen3 work on the pair.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def read_domain(path: Path) -> str:
    """Text of one corpus file; JSON lines are joined in an order that mixes their subjects."""
    with gzip.open(path, "rt", encoding="utf-8") as f:
        if ".jsonl" not in path.name:
            return f.read()
        texts = [json.loads(line)["text"] for line in f]
    order = np.random.default_rng(0).permutation(len(texts))
    return "\n\n".join(texts[i] for i in order)


def split(text: str) -> tuple[str, str]:
    """Training part and held-out tail, cut at a line end."""
    cut = text.index("\n", int(len(text) * (1 - HELD_OUT))) + 1
    return text[:cut], text[cut:]


def make_tokenizer(corpus: Path, work: Path) -> None:
    """Byte-level BPE over the training parts, and the encoded corpus as one .npy a domain."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    work.mkdir(parents=True, exist_ok=True)
    parts = {name: split(read_domain(corpus / file)) for name, file in CORPUS.items()}
    bpe = ByteLevelBPETokenizer()
    sample = [train[i : i + 10_000] for train, _ in parts.values() for i in range(0, 1_000_000, 10_000)]
    bpe.train_from_iterator(sample, vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False)
    tok = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    tok.save_pretrained(work / "tokenizer")
    for name, (train, held) in parts.items():
        for part, text in (("train", train), ("held", held)):
            lines = [text[i : i + 100_000] for i in range(0, len(text), 100_000)]
            ids = np.concatenate([np.array(e.ids, np.uint16) for e in bpe.encode_batch(lines)])
            np.save(work / f"{name}.{part}.npy", ids)
            print(f"{name:12s} {part:5s} {len(ids):9,d} tokens, {len(text.encode()) / len(ids):.2f} bytes each")
        (work / f"{name}.held.txt").write_text(held, encoding="utf-8")


def new_models() -> tuple[Any, Any]:
    """Untrained target (8 MoE layers, 32 experts, top-4) and draft (2 dense layers), one vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shared = {
        "vocab_size": VOCAB, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 1024, "rope_theta": 10_000.0, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    target = Qwen3MoeConfig(
        **shared, num_hidden_layers=8, intermediate_size=256, moe_intermediate_size=48, num_experts=32,
        num_experts_per_tok=4, norm_topk_prob=True, decoder_sparse_step=1, output_router_logits=False,
    )  # fmt: skip
    draft = Qwen3Config(**shared, num_hidden_layers=2, intermediate_size=320)
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(target), Qwen3ForCausalLM(draft)


def balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """Switch-style load balancing, layer by layer: E times the sum of (share of picks x mean probability), 1 at best.

    transformers pools the layers before taking the product, which lets one layer collapse if another makes up for it.
    """
    losses = []
    for logits in router_logits:
        probs = logits.float().softmax(-1)
        picked = torch.zeros_like(probs).scatter_(1, probs.topk(top_k, dim=-1).indices, 1.0 / top_k)
        losses.append(logits.shape[-1] * (picked.mean(0) * probs.mean(0)).sum())
    return torch.stack(losses).mean()


def learning_rate(step: int, steps: int) -> float:
    """Warm up, hold, then decay linearly to a twentieth over the last `DECAY_SHARE` of the run."""
    decay = max(0.0, (step - steps * (1 - DECAY_SHARE)) / (steps * DECAY_SHARE))
    return PEAK_LR * min(1.0, (step + 1) / WARM_UP) * (1 - 0.95 * min(1.0, decay))


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.05, fused=True)


def batch(data: list[np.ndarray], rng: np.random.Generator, rows: int) -> torch.Tensor:
    """Rows of one domain each, domains equally likely, so that routing can follow the domain."""
    out = []
    for _ in range(rows):
        ids = data[rng.integers(len(data))]
        at = rng.integers(len(ids) - ROW)
        out.append(ids[at : at + ROW].astype(np.int64))
    return torch.from_numpy(np.stack(out))


def train_step(models, optimizers, ids: torch.Tensor, lr: float) -> dict[str, float]:
    target, draft = models
    out = target(input_ids=ids, output_router_logits=True, use_cache=False)
    logits, gold = out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    loss = F.cross_entropy(logits, gold)
    balance = balance_loss(out.router_logits, target.config.num_experts_per_tok)
    guess = draft(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    teacher = logits.detach().log_softmax(-1)
    kl = F.kl_div(guess.log_softmax(-1), teacher, log_target=True, reduction="batchmean")
    draft_loss = DRAFT_KL * kl + (1 - DRAFT_KL) * F.cross_entropy(guess, gold)
    (loss + BALANCE * balance + draft_loss).backward()
    for model, opt in zip(models, optimizers, strict=True):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in opt.param_groups:
            group["lr"] = lr
        opt.step()
        opt.zero_grad(set_to_none=True)
    agree = (guess.argmax(-1) == logits.argmax(-1)).float().mean()
    return {"loss": loss.item(), "balance": balance.item(), "kl": kl.item(), "agree": agree.item()}


def fit(work: Path, steps: int) -> None:
    """Train until `steps`, continuing from the last checkpoint in `work` if there is one."""
    models = new_models()
    optimizers = [optimizer(m) for m in models]
    step, checkpoint = 0, work / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        step = saved["step"]
        for m, s in zip(models, saved["models"], strict=True):
            m.load_state_dict(s)
        for o, s in zip(optimizers, saved["optimizers"], strict=True):
            o.load_state_dict(s)
    data = [np.load(work / f"{name}.train.npy", mmap_mode="r") for name in CORPUS]
    log = (work / "log.jsonl").open("a")
    begin, first = time.monotonic(), step
    while step < steps:
        rng = np.random.default_rng(1000 + step)
        numbers = train_step(models, optimizers, batch(data, rng, BATCH), learning_rate(step, steps))
        step += 1
        if step % 20 == 0:
            rate = (step - first) * ROW * BATCH / (time.monotonic() - begin)
            log.write(json.dumps({"step": step, "tokens": step * ROW * BATCH, "tokens_per_s": rate} | numbers) + "\n")
            log.flush()
            shown = " ".join(f"{k} {v:.3f}" for k, v in numbers.items())
            print(f"step {step}/{steps} {shown} {rate:,.0f} tok/s", flush=True)
        if step % 200 == 0 or step == steps:
            state = {
                "step": step,
                "models": [m.state_dict() for m in models],
                "optimizers": [o.state_dict() for o in optimizers],
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)


def write_text(target, data: list[np.ndarray], rng: np.random.Generator, rows: int = 48) -> torch.Tensor:
    """[rows, 128] tokens: 32 of the corpus and 96 that the target continues with, two rows of three greedily."""
    starts = batch(data, rng, rows)[:, :32]
    cut = rows * 2 // 3
    settings = {"max_new_tokens": 96, "min_new_tokens": 96, "pad_token_id": 0}
    with torch.inference_mode():
        greedy = target.generate(starts[:cut], do_sample=False, **settings)
        sampled = target.generate(starts[cut:], do_sample=True, temperature=0.8, **settings)
    return torch.cat([greedy, sampled]).clone()


def distill(work: Path, rounds: int) -> None:
    """Train the draft alone on the target's own writing, from the checkpoint; the target stays as it is."""
    saved = torch.load(work / "checkpoint.pt", weights_only=True)
    target, draft = new_models()
    target.load_state_dict(saved["models"][0])
    draft.load_state_dict(saved["models"][1])
    target.eval().requires_grad_(False)
    opt, done = optimizer(draft), saved.get("distilled", 0)
    data = [np.load(work / f"{name}.train.npy", mmap_mode="r") for name in CORPUS]
    for number in range(done, rounds):
        rng = np.random.default_rng(9_000_000 + number)
        torch.manual_seed(number)
        text = write_text(target, data, rng)
        for group in opt.param_groups:
            group["lr"] = 1.5e-3 * (1 - 0.9 * number / rounds)
        agree = [_distill_step(target, draft, opt, text[i : i + 12]) for _ in range(2) for i in range(0, len(text), 12)]
        print(f"round {number + 1}/{rounds} next-token agreement {np.mean(agree):.3f}", flush=True)
        saved["models"][1], saved["distilled"] = draft.state_dict(), number + 1
        if (number + 1) % 10 == 0:
            torch.save(saved, work / "checkpoint.pt")


def _distill_step(target, draft, opt: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    with torch.no_grad():
        teacher = target(input_ids=ids, use_cache=False).logits[:, 31:-1].flatten(0, 1)
    guess = draft(input_ids=ids, use_cache=False).logits[:, 31:-1].flatten(0, 1)
    # The greedy choice is what verification compares with, so it counts beside the whole distribution.
    kl = F.kl_div(guess.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean")
    (0.5 * kl + 0.5 * F.cross_entropy(guess, teacher.argmax(-1))).backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    return (guess.argmax(-1) == teacher.argmax(-1)).float().mean().item()


def held_out_loss(model: torch.nn.Module, work: Path, rows: int = 24) -> dict[str, float]:
    """Mean next-token loss in nats on the first `rows` held-out rows of each domain."""
    losses = {}
    for name in CORPUS:
        ids = np.load(work / f"{name}.held.npy").astype(np.int64)[: rows * ROW]
        x = torch.from_numpy(ids[: len(ids) // ROW * ROW].reshape(-1, ROW))
        with torch.inference_mode():
            logits = model(input_ids=x, use_cache=False).logits[:, :-1]
        losses[name] = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).item()
    return losses


def export(work: Path, out: Path) -> None:
    """Write both models in bfloat16 with the tokenizer, and `training.json` with the held-out losses."""
    from transformers import AutoTokenizer

    models = new_models()
    saved = torch.load(work / "checkpoint.pt", weights_only=True)
    tok = AutoTokenizer.from_pretrained(work / "tokenizer")
    facts = {
        "steps": saved["step"],
        "tokens": saved["step"] * ROW * BATCH,
        "distillation_rounds": saved.get("distilled", 0),
    }
    for name, model, state in zip(("target", "draft"), models, saved["models"], strict=True):
        model.load_state_dict(state)
        model.to(torch.bfloat16).save_pretrained(out / name)
        tok.save_pretrained(out / name)
        model.float()  # what a user loads: the rounded weights, computed in float32
        losses = held_out_loss(model, work)
        facts[name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "held_out_nats_per_token": losses,
            "held_out_mean": sum(losses.values()) / len(losses),
            "held_out_perplexity": math.exp(sum(losses.values()) / len(losses)),
        }
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="See the top of the file.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("tokenizer", "fit", "distill", "export"):
        verbs.add_parser(verb).add_argument("--work", type=Path, required=True)
    verbs.choices["tokenizer"].add_argument("--corpus", type=Path, required=True)
    verbs.choices["fit"].add_argument("--steps", type=int, default=3000)
    verbs.choices["distill"].add_argument("--rounds", type=int, default=120)
    verbs.choices["export"].add_argument("-o", dest="out", type=Path, required=True)
    a = parser.parse_args()
    if a.verb == "tokenizer":
        make_tokenizer(a.corpus, a.work)
    elif a.verb == "fit":
        fit(a.work, a.steps)
    elif a.verb == "distill":
        distill(a.work, a.rounds)
    else:
        export(a.work, a.out)


if __name__ == "__main__":
    main()
