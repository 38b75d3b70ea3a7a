"""Commands beside a run, their words alone: `check` is done by ``flowcredit.check``, `serve-reward` by
``flowcredit.serving``."""

from typing import Annotated

import typer

from flowcredit.cli_inputs import Overrides


def check(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Try a recipe on its own model and rewards, in the time of one prompt; nothing is written.

    Without noise its images must be the pipeline's own; a fresh rollout must have a ratio of 1; one update
    must move what is trained and nothing else; rewards must tell images apart. Says what an iteration will
    cost. Exit code 1 if something does not hold.

    [cyan]flowcredit check recipes/shapes_g2rpo.yaml[/cyan]

    [cyan]flowcredit check recipes/flux1_dev_g2rpo_lora.yaml model.path=/models/FLUX.1-dev[/cyan]
    """
    from flowcredit.recipe_io import load_recipe

    settings = load_recipe(recipe, overrides or [])
    from flowcredit.check import check_command

    if not check_command(settings):
        raise typer.Exit(1)


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
