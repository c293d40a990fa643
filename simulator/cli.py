"""`spac-sim`: replay a routing trace under several policies on the model of a machine."""

import typer

from ..traces.console import run_app, show_json, show_table
from .cli_fit import fit
from .cli_machines import machines
from .cli_run import AsJson, run
from .cli_sweep import sweep

app = typer.Typer(
    help="Replay a routing trace under several policies on the model of a machine.",
    no_args_is_help=True,
    add_completion=False,
)

app.command("run")(run)
app.command("sweep")(sweep)
app.command("fit")(fit)
app.command("machines")(machines)


@app.command()
def policies(json: AsJson = False) -> None:
    """List the policies that can be named."""
    from ..policies.load import policy_names

    rows = [{"name": name, "about": about} for name, about in sorted(policy_names().items())]
    if json:
        show_json(rows)
    else:
        show_table("Policies", rows)


def main() -> None:
    run_app(app)
