"""`spac-sim`: replay a routing trace under several policies on the model of a machine."""

import typer

from ..traces.console import run_app
from .cli_ablate import ablate
from .cli_fit import fit
from .cli_machines import machines
from .cli_metrics import metrics
from .cli_planning import planning
from .cli_plot import plot
from .cli_policies import policies
from .cli_report import report
from .cli_run import run
from .cli_signs import signs
from .cli_sweep import sweep
from .cli_tune import tune
from .cli_validate import validate

app = typer.Typer(
    help="Replay a routing trace under several policies on the model of a machine.",
    no_args_is_help=True,
    add_completion=False,
)

app.command("run")(run)
app.command("sweep")(sweep)
app.command("plot")(plot)
app.command("report")(report)
app.command("ablate")(ablate)
app.command("fit")(fit)
app.command("validate")(validate)
app.command("signs")(signs)
app.command("tune")(tune)
app.command("machines")(machines)
app.command("policies")(policies)
app.command("planning")(planning)
app.command("metrics")(metrics)


def main() -> None:
    run_app(app)


if __name__ == "__main__":
    main()
