"""What `gpu_check` runs: the checks of the device alone, then those of the embedded pair on it."""

import gc
import platform
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from .device import gpu_name, release_unused
from .device_checks import (
    Found,
    arena_budget,
    copy_bandwidth,
    out_of_memory,
    overlap,
    paged,
    pin_probe,
    preemption,
)

LIMIT_SECONDS = 450.0  # no check is begun later
NEW_TOKENS = 24
SLOTS_PER_LAYER = 10


@cache
def _models(place: str) -> Any:
    from .models import load_models

    return load_models(device=place)


@cache
def _machine(place: str) -> Any:
    from .calibrate import calibrate
    from .probe import PairSubject

    return calibrate(PairSubject(_models(place)), rounds=1)


def _run(place: str, name: str, record: Path | None = None, machine: Any = None) -> tuple[Any, Any]:
    from ..policies.load import load_policy
    from ..traces.prompts import read_prompts
    from ..traces.speculate import Options
    from .session import Settings, run

    models = _models(place)
    slots = SLOTS_PER_LAYER * len(models.pair.shape.moe_layers)
    options = Options(max_new_tokens=NEW_TOKENS, draft_length=4, stop_tokens=models.pair.stop_tokens)
    settings = Settings(machine or _machine(place), slots, "real", options, record=record)
    prompts = read_prompts(None)[:1]
    return run(models, load_policy(name), prompts, settings), prompts


def token_identity(place: str, policies: Sequence[str] | None = None) -> Found:
    """Every lossless policy writes, with the draft, the tokens of transformers' own greedy decoding, in float32."""
    from ..policies.load import OWN
    from ..simulator.machine import load_machine
    from ..traces.prompts import encode
    from .check import find_difference

    models, machine = _models(place), load_machine("rtx4090-pcie4")
    names = policies or sorted(c.name for c in OWN if c.lossless and not c.clairvoyant)
    texts, differences = {}, {}
    for name in names:
        result, prompts = _run(place, name, machine=machine)
        texts[name] = [g.tokens for g in result.generations]
        if texts[name] == next(iter(texts.values())) and len(texts) > 1:
            continue
        ids = [encode(models.pair.tokenizer, p)[0] for p in prompts]
        found = find_difference(models, ids, result.generations, models.pair.stop_tokens, NEW_TOKENS)
        if found is not None:
            differences[name] = {"position": found.position, "margin": found.margin}
    return {"ok": not differences, "policies": len(names), "differences": differences}


def calibration(place: str) -> Found:
    """A profile of this machine from the embedded pair, one round."""
    from ..simulator.machine import show_machine

    machine = _machine(place)
    measured = [name for name, q in machine.quantities.items() if q.basis == "measured"]
    return {"ok": len(measured) > 5, "measured": len(measured), "profile": show_machine(machine)}


def prediction(place: str, policies: Sequence[str] = ("ar-lru", "hybrimoe", "moe-spac")) -> Found:
    """Tokens/s of a run, and what the simulator says of it; how much of the lanes' work was hidden."""
    from ..policies.load import load_policy
    from .predict import predict
    from .times import exposed

    found: Found = {}
    with TemporaryDirectory(prefix="spac-") as folder:
        for name in policies:
            trace = Path(folder) / f"{name}.spac"
            result, _ = _run(place, name, trace)
            said = predict(trace, load_policy(name), _machine(place), result)
            found[name] = {
                "predicted": said.predicted,
                "measured": said.measured,
                "error": said.error,
                "measured_ms": said.measured_split,
                "predicted_ms": said.predicted_split,
                **exposed(list(result.times)),
            }
    return {"ok": all(f["measured"] > 0 for f in found.values()), "policies": found}


@torch.inference_mode()
def floor(place: str, rounds: int = 20) -> Found:
    """ms of a forward pass of the target whose experts do nothing, and of the draft: what no policy can save."""
    from .live import routers_of

    models = _models(place)
    routers_of(models, 0)  # leaves experts that do nothing
    found: Found = {"layers": models.pair.shape.layers}
    for name, model in (("target_ms", models.pair.target), ("draft_ms", models.pair.draft)):
        ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        taken = []
        for _ in range(rounds):
            begin = perf_counter()
            model(ids).logits[0, -1].argmax().item()
            taken.append((perf_counter() - begin) * 1e3)
        found[name] = sorted(taken)[rounds // 2]
    return {"ok": True, **found}


CHECKS: dict[str, Callable[[str], Found]] = {
    "copy_bandwidth": copy_bandwidth,
    "overlap": overlap,
    "preemption": preemption,
    "arena_budget": arena_budget,
    "out_of_memory": out_of_memory,
    "pin_probe": pin_probe,
    "paged": paged,
    "floor": floor,
    "calibration": calibration,
    "prediction": prediction,
    "token_identity": token_identity,
}


def check_all(place: str, checks: dict[str, Callable[[str], Found]], tell: Callable[[str], Any]) -> dict[str, Any]:
    """Run checks in order; one that raises has failed and the next one runs all the same."""
    begin = perf_counter()
    found: dict[str, Found] = {}
    for name, check in checks.items():
        at = perf_counter()
        if at - begin > LIMIT_SECONDS:
            found[name] = {"ok": False, "skipped": "out of time"}
            continue
        gc.collect()
        release_unused(place)
        try:
            found[name] = check(place)
        except Exception as error:
            found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
        found[name]["seconds"] = perf_counter() - at
        tell(f"{name}: {'ok' if found[name]['ok'] else 'FAILED'}, {found[name]['seconds']:.1f} s\n")
    return {
        "ok": all(f["ok"] for f in found.values()),
        "device": gpu_name(place) if place == "cuda" else "emulated: no GPU was used",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "seconds": perf_counter() - begin,
        "checks": found,
    }
