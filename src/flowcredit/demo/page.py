"""The two pages, of gradio's parts; what they show is made elsewhere, as HTML of our own."""

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI

from flowcredit.demo.compare_page import compare_page
from flowcredit.demo.comparing import Album
from flowcredit.demo.growing import grow
from flowcredit.demo.studio import BASE, Moment, Studio, asked_prompt, asked_seed, examples, moments
from flowcredit.demo.tree_page import tree_page
from flowcredit.errors import InputError, one_line
from flowcredit.visible import visible

HERE = Path(__file__).parent
MOST = 8
"""Images of a comparison."""
ONE_AT_A_TIME: Any = {"concurrency_limit": 1, "concurrency_id": "model", "api_visibility": "private"}
LIGHT: Any = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def build_page(studio: Studio) -> gr.Blocks:
    """Both pages about a run. Its checkpoints are looked up at each visit and each drawing."""
    with gr.Blocks(title=f"flowcredit: {studio.recipe.name}", analytics_enabled=False) as page:
        gr.HTML(_head(studio))
        with gr.Tabs():
            with gr.Tab("Base and aligned"):
                _comparing(studio, page)
            with gr.Tab("Rollout tree"):
                _playing(studio, page)
    return page


def mount(app: FastAPI, page: gr.Blocks) -> None:
    """Put the pages at ``/``: with fonts of the system, without links out, uploads, a history or a shared
    address."""
    gr.mount_gradio_app(
        app,
        page,
        path="/",
        footer_links=[],
        run_history=False,
        show_error=False,
        max_file_size=1,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        theme=gr.themes.Base(
            primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
        ).set(button_primary_background_fill="#1d4ed8", button_primary_background_fill_hover="#1e40af"),
        css=(HERE / "demo.css").read_text(encoding="utf-8"),
        head=f"<script>{(HERE / 'player.js').read_text(encoding='utf-8')}</script>",
    )


def _head(studio: Studio) -> str:
    recipe = studio.recipe
    facts = (
        f"{recipe.algorithm.name} on {recipe.model.path}, {recipe.model.width}×{recipe.model.height} pixels,"
        f" {studio.steps} sampling steps. Trained: {', '.join(studio.rewards)}."
        + (f" Watched: {', '.join(studio.watched)}." if studio.watched else "")
    )
    return f'<div class="head"><h1>{escape(recipe.name)}</h1><p class="soft">{escape(facts)}</p></div>'


def _comparing(studio: Studio, page: gr.Blocks) -> None:
    album, known = Album(studio), moments(studio)
    shown = gr.State(known)
    with gr.Row():
        prompt = gr.Textbox(label="Prompt", placeholder="Type a prompt", scale=3, elem_id="prompt")
        seed = gr.Textbox(label="Seed", value="0", scale=1, min_width=100, elem_id="seed")
        count = gr.Dropdown(
            [str(each + 1) for each in range(MOST)], value="1", label="Images", scale=1, min_width=100
        )
    _examples(studio, prompt)
    slider = _slider(known, "compare-slider")
    said = gr.HTML(_which(known, len(known) - 1), elem_classes="which")
    draw = gr.Button("Draw", variant="primary", elem_id="draw")
    alert, out = gr.HTML(elem_id="compare-alert"), gr.HTML(elem_id="compare-out")
    drawn = gr.State(False)

    def compare(text: str, seed: str, count: str, place: float, shown: tuple[Moment, ...]) -> tuple[str, str]:
        def made() -> str:
            asked, number = asked_prompt(studio, text), asked_seed(seed)
            many, moment = max(1, min(MOST, int(count))), _moment(shown, place)
            base = album.draw(asked, number, many, BASE)
            aligned = album.draw(asked, number, many, moment.iteration)
            name = "base again" if moment.iteration == BASE else f"iteration {moment.iteration}"
            return compare_page(
                asked.prompts[0], base, aligned, name, tuple(studio.rewards), tuple(studio.watched)
            )

        return _answered(made)

    def again(drawn: bool, *given: Any) -> Any:
        return compare(*given) if drawn else (gr.skip(), gr.skip())

    given = [prompt, seed, count, slider, shown]
    gr.on([draw.click, prompt.submit, seed.submit], compare, given, [alert, out], **ONE_AT_A_TIME).then(
        lambda: True, None, drawn, **LIGHT
    ).then(_look_again(studio), [slider, shown], [slider, shown, said], **LIGHT)
    slider.change(_say, [slider, shown], said, **LIGHT)
    slider.change(again, [drawn, *given], [alert, out], trigger_mode="always_last", **ONE_AT_A_TIME)
    page.load(_look_again(studio), [slider, shown], [slider, shown, said], **LIGHT)


def _playing(studio: Studio, page: gr.Blocks) -> None:
    known = moments(studio)
    shown = gr.State(known)
    with gr.Row():
        prompt = gr.Textbox(label="Prompt", placeholder="Type a prompt", scale=3, elem_id="tree-prompt")
        seed = gr.Textbox(label="Seed of the noises", value=str(studio.recipe.seed), scale=1, min_width=100)
    _examples(studio, prompt)
    slider = _slider(known, "tree-slider")
    said = gr.HTML(_which(known, len(known) - 1), elem_classes="which")
    button = gr.Button("Roll out", variant="primary", elem_id="roll-out")
    alert, out = gr.HTML(elem_id="tree-alert"), gr.HTML(elem_id="tree-out")

    def play(text: str, seed: str, place: float, shown: tuple[Moment, ...]) -> tuple[str, str]:
        def made() -> str:
            asked, number = asked_prompt(studio, text), asked_seed(seed)
            return tree_page(grow(studio, asked, number, _moment(shown, place).iteration))

        return _answered(made)

    gr.on(
        [button.click, prompt.submit, seed.submit],
        play,
        [prompt, seed, slider, shown],
        [alert, out],
        **ONE_AT_A_TIME,
    ).then(_look_again(studio), [slider, shown], [slider, shown, said], **LIGHT)
    slider.change(_say, [slider, shown], said, **LIGHT)
    page.load(_look_again(studio), [slider, shown], [slider, shown, said], **LIGHT)


def _examples(studio: Studio, prompt: gr.Textbox) -> None:
    chosen = gr.Dropdown(
        examples(studio),
        value=None,
        label="Examples: the run's held-out prompts",
        elem_classes="examples",
        filterable=True,
    )
    chosen.input(lambda text: text or "", chosen, prompt, **LIGHT)


def _slider(known: tuple[Moment, ...], name: str) -> gr.Slider:
    last = len(known) - 1
    return gr.Slider(
        0,
        max(1, last),
        value=last,
        step=1,
        label="Checkpoint, from 0, the base model, on",
        elem_id=name,
        interactive=last > 0,
        buttons=[],
    )


def _which(known: tuple[Moment, ...], place: int) -> str:
    none = " The run has no checkpoint yet: both are the base model." if len(known) == 1 else ""
    return f'<p class="soft" role="status">Weights: {escape(known[place].words)}.{none}</p>'


def _moment(known: tuple[Moment, ...], place: float) -> Moment:
    return known[max(0, min(int(place), len(known) - 1))]


def _say(place: float, known: tuple[Moment, ...]) -> str:
    return _which(known, known.index(_moment(known, place)))


def _look_again(studio: Studio) -> Callable[..., Any]:
    """The checkpoints that there are now; the slider stays with the iteration that it was at."""

    def look(place: float, before: tuple[Moment, ...]) -> Any:
        now, was = moments(studio), _moment(before, place)
        at_end = was == before[-1] and len(now) > 1 and was.iteration == BASE
        here = next((i for i, each in enumerate(now) if each.iteration == was.iteration), len(now) - 1)
        here = len(now) - 1 if at_end else here
        if now == before:
            return gr.skip(), gr.skip(), gr.skip()
        last = len(now) - 1
        slider = gr.update(maximum=max(1, last), value=here, interactive=last > 0)
        return slider, now, _which(now, here)

    return look


def _answered(made: Callable[[], str]) -> tuple[str, str]:
    """What is made, below no alert; or the one line that says what was wrong with what was asked for."""
    try:
        return "", made()
    except InputError as error:
        return f'<p class="alert" role="alert">{escape(visible(one_line(error)))}</p>', ""
