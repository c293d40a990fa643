"""What a GPU's PCIe link could carry, as nvidia-smi tells it."""

import shutil
import subprocess
from typing import NamedTuple

LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # one lane, one way


class LinkLimit(NamedTuple):
    """A PCIe link as it is trained: generation, lanes, and the bytes/s of that; `best` is what the card could do."""

    generation: int
    lanes: int
    rate: float
    best: float


def link_limit(index: int = 0) -> LinkLimit | None:
    """What nvidia-smi says of a GPU's link; None where it is not to be had. Ask after some copies: an idle card trains
    its link down."""
    fields = ("gen.current", "width.current", "gen.max", "width.max")
    query = ",".join(f"pcie.link.{name}" for name in fields)
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={index}"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        now, width, most, widest = (int(part) for part in done.stdout.strip().split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return LinkLimit(now, width, width * LANE_BYTES.get(now, 0.0), widest * LANE_BYTES.get(most, 0.0))
