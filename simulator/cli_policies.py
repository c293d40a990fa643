"""`spac-sim policies`: what can be named, and what is to be known about one policy."""

from typing import Annotated, Any

import typer
from rich.markup import escape

from ..traces.console import say, show_json, show_table
from .cli_run import AsJson


def policies(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show this one: a name or file.py:Class.")
    ] = None,
    json: AsJson = False,
) -> None:
    """List the policies that can be named, or show the parameters, description and source of one."""
    from ..policies.load import describe, policy_names

    if name:
        found = describe(name)
        if json:
            show_json(found)
        else:
            show(found)
        return
    rows = [{"name": n, "about": about} for n, about in sorted(policy_names().items())]
    if json:
        show_json(rows)
    else:
        show_table("Policies", rows)


def show(found: dict[str, Any]) -> None:
    say(escape(found["description"]))
    say("")
    if found["parameters"]:
        show_table(f"Parameters of {found['name']}", found["parameters"])
    notes = ["slots of its own for every layer" if found["scope"] == "layer" else "one pool of slots for all layers"]
    notes += [] if found["lossless"] else ["changes tokens, so it needs --allow-lossy"]
    notes += ["knows the future, so it cannot run live"] if found["clairvoyant"] else []
    say(f"{found['name']}: {'; '.join(notes)}.")
    say(escape(f"Source: {found['source']}"))
