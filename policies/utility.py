"""MoE-SpAc's speculative activation utility: one small integer for every expert, moved by what a verify batch shows."""

import numpy as np


def transition(utility: np.ndarray, d: np.ndarray, up: float, down: float, top: int) -> np.ndarray:
    """Inertial utility transition, at most one level at a time.

    utility: [E] in 0..top; d: [E] tokens of the batch that chose each expert, less its utility. A utility rises by 1
    if d >= up, falls by 1 if -d >= down (both at least 1), and stays in 0..top. From the released code (77bb9cf,
    `StateMachine`), where up = 5, down = 1, top = 5.
    """
    moved = utility + (d >= up)
    moved -= d <= -down
    return np.minimum(moved, top, out=moved)


def calibrate(
    d: np.ndarray, up: float, down: float, top: int, smoothing: float, most: int | None = None
) -> tuple[float, float]:
    """Adaptive boundary calibration: the boundaries follow the mean rise and the mean fall of this batch.

    d: [E] deviations, of which none is below -`most` (default: top, as for counts - utilities). The paper names a
    moving average and gives no formula; this one is ours. A direction in which nothing deviates leaves its boundary
    alone. Both stay in 1..top.
    """
    most = top if most is None else most
    spread = np.bincount(d + most).tolist()  # how often each deviation -most, -most + 1, ... occurs
    falls, rises = spread[:most], spread[most + 1 :]
    if risen := sum(rises):
        up += smoothing * (sum(d * n for d, n in enumerate(rises, 1)) / risen - up)
    if fallen := sum(falls):
        down += smoothing * (sum((most - i) * n for i, n in enumerate(falls)) / fallen - down)
    return min(max(up, 1.0), float(top)), min(max(down, 1.0), float(top))


def scaled_constants(draft_length: int, top: int) -> tuple[int, int, int]:
    """(top, up, down) for another draft length: up = draft + 1 - (top - 1), so that the top level is just reachable.

    Ours (the release's 5, 5, 1 fit a draft of 8 only). A verify batch with fewer tokens than levels gets fewer levels.
    """
    top = min(top, draft_length + 1)
    return top, max(1, draft_length + 2 - top), 1


class UtilityEstimator:
    """Utilities of all experts, `u` [L, E], with boundaries that are shared by the experts of a layer."""

    def __init__(
        self,
        layers: int,
        experts: int,
        top: int,
        up: float,
        down: float,
        smoothing: float | None,
        by_change: bool = False,
    ) -> None:
        """`smoothing` None keeps the boundaries where they are; `by_change`: they follow how counts differ from those
        of the layer's last batch, not from utilities."""
        self._last = np.zeros((layers, experts), dtype=np.int64) if by_change else None
        self.u = np.zeros((layers, experts), dtype=np.int64)
        self.boundaries = [(float(up), float(down))] * layers
        self._top, self._smoothing = top, smoothing

    def update(self, layer: int, counts: np.ndarray) -> np.ndarray:
        """Move the utilities of one layer by the present boundaries, then the boundaries. Returns the new u[layer]."""
        up, down = self.boundaries[layer]
        before = self.u[layer]
        d = counts - before
        after = transition(before, d, up, down, self._top)
        if self._smoothing is not None and self._last is not None:
            last = self._last[layer]
            most = int(last.max())
            self.boundaries[layer] = calibrate(counts - last, up, down, self._top, self._smoothing, most)
            self._last[layer] = counts
        elif self._smoothing is not None:
            self.boundaries[layer] = calibrate(d, up, down, self._top, self._smoothing)
        self.u[layer] = after
        return after
