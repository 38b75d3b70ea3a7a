"""Commands beside a run, their words alone: `check` is done by ``flowcredit.check``, `serve-reward` by
``flowcredit.serving``, `compare` by ``flowcredit.compare``, `launch` by ``flowcredit.launch``, `demo` by
``flowcredit.demo``."""

from pathlib import Path
from typing import Annotated

import typer

from flowcredit.cli_inputs import INTERRUPTED, Overrides, check_run, open_source
from flowcredit.completion import complete_recipe, complete_reward


def check(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A recipe file.", show_default=False, autocompletion=complete_recipe
        ),
    ],
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


def replay(
    fault: Annotated[
        Path,
        typer.Argument(metavar="FAULT", help="A folder of faults/ in a run's folder.", show_default=False),
    ],
) -> None:
    """Bring a kept fault about again: a reward that failed, or numbers that were not finite.

    A run keeps the batch in which it first saw one, and the weights of then. Says whether it comes again, and
    where in the network. Exit code 1 if it does not.

    [cyan]flowcredit replay runs/shapes-g2rpo/faults/000012-gradient[/cyan]
    """
    from flowcredit.replay import replay_command

    if not replay_command(fault):
        raise typer.Exit(1)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write it.", show_default=False)],
    iteration: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Of which checkpoint; the newest by default.", show_default=False
        ),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Of the kept checkpoint that was best on held-out prompts.")
    ] = False,
) -> None:
    """Write the weights of a checkpoint as final/ holds those of the end: for plain diffusers.

    Averaged weights where the run keeps them. What is kept: checkpoint.keep_last and checkpoint.keep_best.

    [cyan]flowcredit export runs/shapes-g2rpo --best --out best[/cyan]
    """
    from flowcredit.checkpoint_export import export_command

    export_command(run, out, iteration, best)


def serve_reward(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A reward by name, or module:attribute.",
            show_default=False,
            autocompletion=complete_reward,
        ),
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


def demo(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; the default is this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 takes a free one.")] = 7860,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Look at a run in a browser: base and aligned side by side, and the rollout tree of a prompt.

    Works on a run that is still going on, and writes nothing into its folder; Ctrl-C ends it. Needs
    pip install "flowcredit\\[demo]". docs/demo.md tells how to use it on a remote machine.

    [cyan]flowcredit demo runs/shapes-g2rpo --open[/cyan]

    [cyan]flowcredit demo runs/flux --port 8000 model.offload=\\[text_encoders][/cyan]
    """
    recipe, run_dir = open_source(
        str(check_run(run).path), ["parallel.sharding=replicated", *(overrides or [])]
    )
    assert run_dir is not None, "a run has a folder"
    from flowcredit.demo.command import demo_command

    demo_command(recipe, run_dir, host, port, show)


Recipes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE...|FILE",
        help="Recipes, or folders of runs; or one comparison file.",
        show_default=False,
        autocompletion=complete_recipe,
    ),
]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="'NAME: RECIPE SETTING=VALUE ...'",
        help="A recipe with changes, under a name; may be given several times.",
        show_default=False,
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND=N",
        help="Each run's cost: nfe=4e5 (velocity evaluations), seconds=600 or calls=2e4 (reward calls).",
        show_default=False,
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=1000, help="Seeds 0 to N - 1 of each arm; 3.", show_default=False),
]
SamplingSteps = Annotated[
    list[int] | None,
    typer.Option(
        metavar="N",
        min=1,
        max=1000,
        help="Also evaluate the trained weights at so many sampling steps; may be given several times.",
        show_default=False,
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTING=VALUE",
        help="Change a setting in every arm; may be given several times.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="runs/compare/NAME by default.", show_default=False)
]
Parallel = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=1024,
        help="Runs at a time; by default as many as there are cores for. On one GPU say 1.",
        show_default=False,
    ),
]


def compare(
    recipes: Recipes = None,
    arms: Arms = None,
    budget: BudgetOption = None,
    seeds: Seeds = None,
    steps: SamplingSteps = None,
    changes: Changes = None,
    out: Out = None,
    parallel: Parallel = None,
    threads: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Threads of each run.")] = 1,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Run nothing; write the page of what there is.")
    ] = False,
) -> None:
    """Train several recipes at one budget with several seeds, and write one page about them.

    Ctrl-C and a killed process lose no finished iteration: give the command again. Exit code 1 if a run
    failed. docs/comparing.md tells how to read the page.

    [cyan]flowcredit compare comparisons/g2rpo_table1.yaml[/cyan]

    [cyan]flowcredit compare recipes/shapes_g2rpo.yaml recipes/shapes_flow_grpo.yaml --budget nfe=4e5[/cyan]

    [cyan]flowcredit compare recipes/shapes_g2rpo.yaml --budget nfe=1e5 --seeds 5
    --arm 'one stride: recipes/shapes_g2rpo.yaml algorithm.strides=\\[1]'[/cyan]
    """
    from rich.console import Console

    from flowcredit.compare.arms import from_words
    from flowcredit.compare.command import adjusted, compare_command, default_parallel
    from flowcredit.compare.processes import start_flowcredit

    comparison, amount = adjusted(from_words(recipes or [], arms or []), budget, seeds, steps, changes or [])
    folder = out or Path("runs", "compare", comparison.name)
    at_a_time = parallel or default_parallel(threads)
    try:
        well = compare_command(
            comparison, amount, folder, at_a_time, start_flowcredit(threads), Console(), run=not page_only
        )
    except KeyboardInterrupt:
        typer.echo("\nInterrupted; no finished iteration is lost; give the command again to go on", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if not well:
        raise typer.Exit(1)


def launch(
    words: Annotated[
        list[str],
        typer.Argument(metavar="train ...", help="The command of every process.", show_default=False),
    ],
    nproc: Annotated[
        int, typer.Option("--nproc", metavar="N", min=1, max=1024, help="Processes here, one for each GPU.")
    ],
    nnodes: Annotated[int, typer.Option(metavar="N", min=1, max=65536, help="Machines.")] = 1,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where machines meet: the first, on all of them.", show_default=False
        ),
    ] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(
            metavar="WORD", help="Of this run, where several meet at one endpoint.", show_default=False
        ),
    ] = None,
) -> None:
    """Train on several devices: start the processes, as torchrun does, and end all of them as one.

    An error is told once, with the process that it is of. Ctrl-C finishes the iteration and saves; a second
    ends at once.

    [cyan]flowcredit launch --nproc 8 train recipes/flux1_dev_g2rpo_hps.yaml[/cyan]

    [cyan]flowcredit launch --nproc 8 train --resume runs/flux1-dev-g2rpo-hps[/cyan]

    [cyan]flowcredit launch --nproc 8 --nnodes 2 --rdzv-endpoint first:29500 train my.yaml[/cyan]
    """
    from flowcredit.launch import Place
    from flowcredit.launch import launch as start

    code = start(words, Place(nproc, nnodes, rdzv_endpoint, rdzv_id))
    if code:
        raise typer.Exit(code)
