"""All figures of a folder of results, as PNG and SVG, drawn without a display.

A figure that the data cannot give is left out with the reason; a policy that failed is named in the figures and breaks
none of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from .plot_style import NothingToShow, save
from .plots_drafts import against_acceptance, by_draft_length
from .plots_maps import by_machine, memory_against_speed, residency
from .plots_speed import against_slots, by_policy, time_of_a_token
from .results import Slice, read_slices

# Of one trace on one machine
FIGURES: dict[str, Callable[[Slice], Figure]] = {
    "speed": by_policy,
    "slots": against_slots,
    "time": time_of_a_token,
    "acceptance": against_acceptance,
    "lengths": by_draft_length,
    "residency": residency,
}
# Of all of a folder
ACROSS: dict[str, Callable[[Sequence[Slice]], Figure]] = {
    "machines": by_machine,
    "pareto": memory_against_speed,
}
NAMES = (*FIGURES, *ACROSS)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What became of a figure: its files, or why there is none. `of`: the trace and machine, given several."""

    figure: str
    of: str
    files: tuple[Path, ...] = ()
    why_not: str = ""


def draw_folder(
    folder: Path, out: Path | None = None, only: Sequence[str] = (), progress: Callable[[int], None] | None = None
) -> list[Drawn]:
    """Draw what `folder` can give, or those named in `only`, into `out` (default: the folder itself). The figures of
    each trace and machine of a sweep get a folder of their own. `progress` hears how many per cent are done.

    InputError if the folder cannot be read, OSError if a file cannot be written.
    """
    parts, out = read_slices(folder), out or folder
    wanted = only or NAMES
    todo: list[tuple[str, str, Callable[[], Figure]]] = []
    for part in parts:
        of = f"{part.trace}-{part.machine.name}" if len(parts) > 1 else ""
        todo += [(name, of, partial(draw, part)) for name, draw in FIGURES.items() if name in wanted]
    todo += [(name, "", partial(draw, parts)) for name, draw in ACROSS.items() if name in wanted]
    drawn = []
    for name, of, draw in todo:
        drawn.append(_drawn(name, out / of, of, draw))
        if progress:
            progress(100 * len(drawn) // len(todo))
    return drawn


def _drawn(name: str, where: Path, of: str, draw: Callable[[], Figure]) -> Drawn:
    try:
        figure = draw()
    except NothingToShow as reason:
        return Drawn(name, of, why_not=str(reason))
    where.mkdir(parents=True, exist_ok=True)
    return Drawn(name, of, tuple(save(figure, where / name)))
