"""`spac-exec`: real inference under a policy."""

import typer

from ..traces.console import run_app
from .cli_bench import bench
from .cli_calibrate import calibrate
from .cli_chat import chat
from .cli_doctor import doctor
from .cli_generate import generate
from .cli_replay import replay
from .cli_serve import serve
from .cli_versus import versus

app = typer.Typer(help="Run real inference under a policy.", no_args_is_help=True, add_completion=False)

app.command("generate")(generate)
app.command("chat")(chat)
app.command("serve")(serve)
app.command("bench")(bench)
app.command("doctor")(doctor)
app.command("calibrate")(calibrate)
app.command("replay")(replay)
app.command("versus")(versus)


def main() -> None:
    run_app(app)


if __name__ == "__main__":
    main()
