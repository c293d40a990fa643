"""`spac-sim metrics`: what the numbers mean."""

from ..traces.console import show_json, show_table
from .cli_run import AsJson
from .definitions import METRICS


def metrics(json: AsJson = False) -> None:
    """Define every number of metrics.json and `run --json`."""
    rows = [{"name": name, "unit": unit, "meaning": meaning} for name, (unit, meaning) in METRICS.items()]
    if json:
        show_json(rows)
    else:
        show_table("Metrics of a run", rows)
