"""The command ``flowcredit serve-reward``: its words alone; what it does is in ``flowcredit.serving``."""

from typing import Annotated

import typer


def serve_reward(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A reward by name, or module:attribute.", show_default=False),
    ],
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="An option of the reward; may be given several times.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; the default is this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8765,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda:1, ...")] = "auto",
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="VARIABLE",
            help="Environment variable with a token that every client must send.",
            show_default=False,
        ),
    ] = None,
    max_request_mb: Annotated[
        int, typer.Option(metavar="N", min=1, max=4096, help="Longest request, in MiB.")
    ] = 256,
) -> None:
    """Serve a reward over HTTP, for runs that name it as 'http'; Ctrl-C ends it.

    docs/remote_rewards.md has the protocol, and what it means to listen beyond this machine.

    [cyan]flowcredit serve-reward clip --option path=/models/clip --port 8765[/cyan]

    [cyan]flowcredit train my_recipe.yaml 'rewards=[{name: http, options: {url: "http://127.0.0.1:8765"}}]'[/cyan]
    """
    from flowcredit.serving import serve_command

    serve_command(name, option or [], host, port, device, token_env, max_request_mb)
