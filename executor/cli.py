"""`spac-exec`: real inference under a policy."""

import gc

import typer

from ..traces.console import run_app
from .cli_calibrate import calibrate
from .cli_chat import chat
from .cli_generate import generate
from .cli_serve import serve

app = typer.Typer(help="Run real inference under a policy.", no_args_is_help=True, add_completion=False)

app.command("generate")(generate)
app.command("chat")(chat)
app.command("serve")(serve)
app.command("calibrate")(calibrate)


def main() -> None:
    try:
        run_app(app)
    finally:
        gc.freeze()  # or the interpreter's last collection walks for a second through all that torch has made
