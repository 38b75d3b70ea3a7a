"""What `flowcredit plan --gpus` derives: FLOPs against torch's own counter, bytes against a run's."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import diffusers
import memory
import pytest
import scaling as scaling_benchmark
import torch
import transformers
from diffusers import AutoencoderKL
from torch.utils.flop_counter import FlopCounterMode

from flowcredit import scaling
from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.memory import folders
from flowcredit.memory.activations import Passes, decoding_flops
from flowcredit.memory.counts import NETWORKS, clip_flops
from flowcredit.memory.estimate import estimate
from flowcredit.memory.families import Inputs
from flowcredit.memory.folders import Component
from flowcredit.plan_command import plan_command
from flowcredit.quiet import quiet_libraries
from flowcredit.recipe_io import load_recipe

RECIPES = Path(__file__).parent.parent / "recipes"
FLUX = RECIPES / "flux1_dev_g2rpo_hps.yaml"
PUBLISHED = json.loads((Path(folders.__file__).parent / "published.json").read_text())


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with quiet_libraries():
        yield


def counted(run: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return int(counter.get_total_flops())


def published(name: str) -> Any:
    return PUBLISHED["models"][name]["parts"]


def test_flops_of_flux_at_full_size_are_torchs() -> None:
    """On the meta device: shapes without values."""
    config = published("FLUX.1-dev")["transformer"]
    rows, tokens, words = 2, 45 * 45, 512
    with torch.device("meta"):
        network = diffusers.FluxTransformer2DModel(**{k: v for k, v in config.items() if k[0] != "_"})
        found = counted(
            lambda: network(
                hidden_states=torch.empty(rows, tokens, 64),
                encoder_hidden_states=torch.empty(rows, words, 4096),
                pooled_projections=torch.empty(rows, 768),
                timestep=torch.empty(rows),
                guidance=torch.empty(rows),
                img_ids=torch.empty(tokens, 3),
                txt_ids=torch.empty(words, 3),
            )
        )
    inputs = Inputs((tokens, 64), (words, 4096), 768, (16, 90, 90))
    assert flops_of(config, inputs, rows) == found


def flops_of(config: Any, inputs: Inputs, rows: int) -> int:
    kind = config["_class_name"]
    component = Component("transformer", kind, config, None)
    passes = Passes(NETWORKS[kind], component, inputs, 4, None, True, True, 0, lambda name: False, False)
    return passes.flops(rows)


def test_flops_of_a_unet_are_torchs() -> None:
    network = memory.NETWORKS["sd1"]().to("meta")
    found = counted(
        lambda: network(
            torch.empty(3, 4, 8, 8, device="meta"),
            torch.empty(3, device="meta"),
            torch.empty(3, 7, 16, device="meta"),
        )
    )
    config = {**network.config, "_class_name": "UNet2DConditionModel"}
    assert flops_of(config, Inputs((4, 8, 8), (7, 16), 0, (4, 8, 8)), 3) == found


def test_flops_of_a_decode_are_torchs() -> None:
    config = published("FLUX.1-dev")["vae"]
    levels = len(config["block_out_channels"])
    with torch.device("meta"):
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            **{k: v for k, v in config.items() if k[0] != "_"},
        )
        found = counted(lambda: vae.decode(torch.empty(1, 16, 90, 90)))
    component = Component("vae", "AutoencoderKL", config, None)
    assert decoding_flops(component, Inputs((2025, 64), (512, 4096), 768, (16, 90, 90))) == found


def test_flops_of_a_clip_reward_are_torchs() -> None:
    config = PUBLISHED["rewards"][0]
    settings = transformers.CLIPConfig(**{k: v for k, v in config.items() if k != "names"})
    settings._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = transformers.CLIPModel(settings).eval()
        words, image = torch.ones(1, 77, dtype=torch.int64), torch.empty(1, 3, 224, 224)
        found = counted(lambda: model(input_ids=words, pixel_values=image))
    assert clip_flops(config) == pytest.approx(found, rel=1e-4)
    assert folders.reward_flops(Path("anywhere") / config["names"][0]) == clip_flops(config)


def derived(overrides: Sequence[str] = ()) -> scaling.Counts:
    recipe = load_recipe(FLUX, overrides)
    found = scaling.counts(recipe, estimate(recipe))
    assert found is not None
    return found


def test_one_iteration_of_flux_by_hand() -> None:
    """A prompt of the recipe: T = 16, M = 0..7, G = 12, strides 1, 2, 3, trained are 8 states."""
    found = derived()
    plan = found.algorithm.plan
    one = scaling.derive(found, 8, scaling.Assumptions(peak_tflops=1000, utilisation=0.5))
    evaluations = 2 * (plan.velocity_evaluations + 8 * (1 + 2 + 1))
    scored = 2 * plan.decodes * ((found.work.decode or 0) + found.score)
    assert one.prompts == 2
    assert one.computing_s == pytest.approx((evaluations * found.work.evaluation + scored) / 5e14)
    # A ring of 8 within a machine sums 11.9 B gradients of 4 bytes at each of 8 optimizer steps.
    assert one.sent.summed == pytest.approx(2 * 7 / 8 * 4 * 11_901_408_320 * 8)
    assert one.sending_s == pytest.approx(one.sent.summed / 450e9)
    assert one.seconds == pytest.approx(one.computing_s + one.sending_s)


def test_it_stops_where_each_device_has_one_prompt() -> None:
    found, assumed = derived(), scaling.Assumptions()
    assert scaling.derive(found, 512, assumed).computing_s == scaling.derive(found, 16, assumed).computing_s
    last = scaling.stops(found, assumed)
    assert last.gpus == 16
    assert "16 prompts of train.prompts_per_iteration" in scaling.why_it_stops(found, last, assumed)
    more = derived(["train.prompts_per_iteration=512"])
    assert scaling.stops(more, assumed).gpus == 512
    # A thousand times less between machines: sending, not prompts, is the limit.
    slow = scaling.Assumptions(network_gbs=0.05)
    last = scaling.stops(more, slow)
    assert last.gpus == 8
    assert "it stops at 8 GPUs: with 16 each sends" in scaling.why_it_stops(more, last, slow)


def test_gathering_hides_behind_the_computing_of_its_own_phase() -> None:
    found = derived(["parallel.sharding=sharded"])
    one = scaling.derive(found, 16, scaling.Assumptions())
    trained_s = one.training_flops / (989e12 * 0.4)
    # A prompt's 8 trained states, each with two gathers of 2 bytes a weight and a scatter of 4.
    sent_s = 15 / 16 * 8 * 8 * 11_901_408_320 / 50e9
    assert sent_s > trained_s
    assert one.seconds == pytest.approx(one.computing_s - trained_s + sent_s)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("layout", "update"), [("replicated", "per_step"), ("sharded", "accumulated")])
def test_bytes_are_those_that_a_run_sends(layout: str, update: str) -> None:
    """Scores, counts and metrics, which are not derived, are a few thousand bytes of some millions."""
    overrides = [
        *scaling_benchmark.SMALL,
        "algorithm={name: g2rpo, num_steps: 4, group_size: 3, strides: [1], train_steps: [0, 1]}",
        f"parallel.sharding={layout}",
        f"train.update={update}",
        "train.prompts_per_iteration=2",
    ]
    recipe: Recipe = load_recipe(scaling_benchmark.RECIPE, overrides)
    told = scaling_benchmark.run(2, overrides, iterations=0)
    found = scaling.counts(recipe, estimate(recipe, 2))
    assert found is not None
    bytes_sent = scaling.sent(found, 2).total
    for process in told:
        assert sum(process["sent"].values()) == pytest.approx(bytes_sent, rel=0.01)
    part = 2 if layout == "sharded" else 1
    assert told[0]["memory"]["weights"] * part == pytest.approx(4 * found.trained, rel=1e-3)


def test_assumptions_are_printed_as_such_and_can_be_changed() -> None:
    recipe = load_recipe(FLUX)
    text = plan_command(recipe, False, None, 64, scaling.Assumptions(peak_tflops=123, utilisation=0.25))
    assert "64 GPUs, replicated: derived from counts, not measured" in text
    assert "assumed: 123 TFLOP/s a GPU at its peak, of which 25% are reached; 450 GB/s" in text
    rows = json.loads(plan_command(recipe, True, None, 64))["derived"]["gpus"]
    assert [row["gpus"] for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    assert "derived" not in json.loads(plan_command(recipe, True))


@pytest.mark.parametrize("name", ["http", "chat", "ocr"])
def test_what_a_remote_or_foreign_reward_costs_is_not_told_as_nothing(name: str) -> None:
    options = {"http": "{url: 'http://a.test/'}", "chat": "{url: 'http://a.test/', model: m}", "ocr": "{}"}
    own = [f"rewards=[{{name: {name}, options: {options[name]}}}]", "watch=[]"]
    recipe = load_recipe(FLUX, own)
    found = scaling.counts(recipe, estimate(recipe))
    assert found is not None
    assert found.uncounted == (name,)
    assert f"a score: (not known, and not counted: {name})" in "\n".join(
        scaling.lines(found, 8, scaling.Assumptions())
    )
    assert json.loads(plan_command(recipe, True, None, 8))["derived"]["not_known"] == [name]
    checker = scaling.counts(load_recipe(FLUX, ["rewards=[sharpness]"]), estimate(recipe))
    assert checker is not None
    assert checker.uncounted == ()


def test_the_times_of_a_small_model_are_not_told_as_zero() -> None:
    text = plan_command(load_recipe(RECIPES / "shapes_g2rpo.yaml"), False, None, 2)
    rows = [line.split() for line in text.splitlines() if line.split()[:2] in (["1", "32"], ["2", "16"])]
    assert len(rows) == 2
    assert all(float(row[place]) > 0 for row in rows for place in (2, 5))
    assert [float(row[4]) > 0 for row in rows] == [False, True]


@pytest.mark.parametrize("value", ["inf", "1e300", "nan", "0"])
@pytest.mark.parametrize("option", ["--peak-tflops", "--link-gbs", "--network-gbs", "--utilisation"])
def test_speeds_that_are_none_are_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowcredit.cli import main

    monkeypatch.setattr("sys.argv", ["flowcredit", "plan", str(FLUX), "--gpus", "8", option, value])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


def test_an_assumption_without_gpus_is_refused() -> None:
    from flowcredit.cli_inputs import assumptions

    with pytest.raises(InputError, match="--link-gbs is for --gpus"):
        assumptions(None, {"peak_tflops": None, "link_gbs": 3.0})
