"""Published statistics of a model (the content of its .toml) beside those of a synthetic process."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .stats import decode_routing
from .synth import published
from .synth_process import Process
from .synth_stats import Sample, sample, statistic


@dataclass(frozen=True, slots=True)
class Target:
    """A published figure. weight: how much a relative miss counts in the fit; 0 is only compared."""

    name: str
    value: float
    sample: str
    source: str
    weight: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure and ours."""

    target: Target
    ours: float

    @property
    def error(self) -> float:
        """Relative to the published figure."""
        return self.ours / self.target.value - 1


def targets(like: str, names: Collection[str] | None = None) -> list[Target]:
    """The published figures of a model (those of these names, or all); those without a value are measured on the
    bundled trace that its .toml names.
    """
    about = published(like)
    found = []
    for entry in about["targets"]:
        if names is not None and entry["name"] not in names:
            continue
        value = entry.get("value")
        if value is None:
            value = statistic(entry["name"], bundled(like), about["domains"])
        found.append(Target(**{**entry, "value": value}))
    return found


@cache
def bundled(like: str) -> Sample:
    """The real routing that a model is fitted to: equally long beginnings of the sequences of a bundled trace."""
    from .reader import open_trace

    about = published(like)["real"]
    trace = open_trace(about["trace"])
    routing = decode_routing(trace)
    starts = routing.offsets[:-1][np.diff(routing.offsets) >= about["tokens"]]
    rows = (starts[:, None] + np.arange(about["tokens"])).reshape(-1)
    return Sample(routing.experts[rows], (0,) * len(starts), trace.header.target.experts)


def overlap_profile(like: str) -> np.ndarray:
    """[L] lag-1 overlap of each layer. Where only some are published, the others lie on lines between them and
    between the points of `shape`, all scaled by one factor so that the mean is the published one.
    """
    about = published(like)
    if "overlap" not in about:
        return _by_layer(like, "overlap")
    given, layers = about["overlap"], _layers(about)
    measured = {int(layer): value for layer, value in given.get("measured", {}).items()}
    shape = {int(layer): value * given["shape_factor"] for layer, value in given.get("shape", {}).items()}
    knots = shape | measured or {0: given["mean"]}
    profile = _lines(knots, layers)
    free = np.array([layer not in measured for layer in range(layers)])
    profile[free] *= (given["mean"] * layers - profile[~free].sum()) / profile[free].sum()
    return profile


def skew_profiles(like: str) -> tuple[np.ndarray, np.ndarray] | None:
    """[L] share of the busiest 20 % of experts over all text, and within one domain; None if not published."""
    about = published(like)
    if "real" in about:
        return _by_layer(like, "top20"), _by_layer(like, "top20")
    if "skew" not in about:
        return None
    together, by_domain = (
        _lines({int(layer): value for layer, value in about["skew"][name].items()}, _layers(about))
        for name in ("together", "by_domain")
    )
    return together, by_domain


def generated(like: str, process: Process, name: str, seed: int) -> Sample:
    """A sample in one of the set-ups in which something was published."""
    about = published(like)
    setup = about["samples"][name]
    domains = [about["domains"].index(d) for d in setup.get("domains", about["domains"])]
    places = tuple(domains[i % len(domains)] for i in range(setup["sequences"]))
    return sample(process, places, setup["tokens"], seed)


def compare(like: str, process: Process, chosen: Iterable[Target], seed: int) -> list[Row]:
    """Published figures beside those of the process, from samples of this seed."""
    names = published(like)["domains"]
    samples: dict[str, Sample] = {}
    rows = []
    for target in chosen:
        if target.sample not in samples:
            samples[target.sample] = generated(like, process, target.sample, seed)
        rows.append(Row(target, statistic(target.name, samples[target.sample], names)))
    return rows


def _by_layer(like: str, name: str) -> np.ndarray:
    real = bundled(like)
    return np.array([statistic(f"{name}@{layer}", real, []) for layer in range(real.experts.shape[1])])


def _layers(about: dict[str, Any]) -> int:
    return about["model"]["layers"] - about["model"]["first_moe_layer"]


def _lines(knots: dict[int, float], layers: int) -> np.ndarray:
    at = sorted(knots)
    return np.interp(np.arange(layers), at, [knots[layer] for layer in at])
