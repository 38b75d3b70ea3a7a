"""Arms and comparison files: what they mean, and how they are refused."""

from pathlib import Path

import pytest

from flowcredit.compare.arms import Comparison, from_words, read_comparison
from flowcredit.compare.command import adjusted
from flowcredit.compare.runs import plan_runs
from flowcredit.errors import InputError

ROOT = Path(__file__).parent.parent
RECIPE = """\
name: small
model: {path: "bundled:shapes"}
prompts: {train: "bundled:shapes/train", heldout: "bundled:shapes/heldout"}
rewards: [shapes]
algorithm: {name: g2rpo, num_steps: 4, group_size: 4, strides: [1]}
train: {prompts_per_iteration: 3, lr_schedule: linear}
"""
FILE = """\
recipe: small.yaml
budget: nfe=1000
seeds: [4, 7]
set: {train.learning_rate: 2.0e-5, evaluation.prompts: 12}
arms:
  - name: one
  - name: two
    set: {"algorithm.strides": [1, 2], train.learning_rate: 0.5}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(RECIPE)
    return tmp_path


def read(text: str) -> Comparison:
    Path("table.yaml").write_text(text)
    return from_words(["table.yaml"], [])


def test_a_file_gives_arms_with_their_own_changes_above_the_common_ones() -> None:
    found = read(FILE)
    assert (found.name, found.seeds, found.budget) == ("table", (4, 7), "nfe=1000")
    one, two = (arm.load() for arm in found.arms)
    assert (one.train.learning_rate, two.train.learning_rate) == (2e-5, 0.5)
    assert one.evaluation.prompts == two.evaluation.prompts == 12
    assert [recipe.algorithm.model_dump()["strides"] for recipe in (one, two)] == [(1,), (1, 2)]


def test_a_whole_section_replaces_what_is_common_below_it() -> None:
    text = FILE.replace("evaluation.prompts: 12", "algorithm.strides: [2]").replace(
        'set: {"algorithm.strides": [1, 2], train.learning_rate: 0.5}',
        "set: {algorithm: {name: flow_grpo, num_steps: 3}}",
    )
    one, two = (arm.load() for arm in read(text).arms)
    assert (one.algorithm.name, two.algorithm.name) == ("g2rpo", "flow_grpo")


def test_a_grid_multiplies_every_arm() -> None:
    found = read(FILE + "grid: {noise.eta: [0.1, 0.5], train.betas: [[0.5, 0.9]]}\n")
    assert [arm.name for arm in found.arms] == [
        "one, eta 0.1, betas [0.5, 0.9]",
        "one, eta 0.5, betas [0.5, 0.9]",
        "two, eta 0.1, betas [0.5, 0.9]",
        "two, eta 0.5, betas [0.5, 0.9]",
    ]
    assert [arm.load().noise.eta for arm in found.arms] == [0.1, 0.5, 0.1, 0.5]
    assert len({arm.slug for arm in found.arms}) == 4


def test_names_without_a_letter_get_folders_of_their_own() -> None:
    arms = "arms: [{name: Λ}, {name: η}, {name: 'Λ = {1}'}, {name: 'η = {1}'}, {name: ../up}]\n"
    slugs = [arm.slug for arm in read(FILE[: FILE.index("arms")] + arms).arms]
    assert len(set(slugs)) == 5
    assert all(slug and "/" not in slug and not slug.startswith(".") for slug in slugs)


def test_recipes_and_arms_of_the_command_line() -> None:
    found = from_words(["small.yaml"], [])
    assert (found.name, [arm.name for arm in found.arms]) == ("small", ["small"])
    found = from_words(["small.yaml"], ["two: small.yaml 'algorithm.strides=[1, 2]' noise.eta=0.1"])
    assert found.name == "small-vs-two"
    two = found.arms[1].load()
    assert (two.algorithm.model_dump()["strides"], two.noise.eta) == ((1, 2), 0.1)
    many = [from_words([], [f"{'n' * 50} {n}: small.yaml" for n in (1, last)]).name for last in (2, 3)]
    assert many[0] != many[1]  # Cut where they are long, and still two folders.
    assert max(map(len, many)) <= 80
    changed, budget = adjusted(found, "calls=72", seeds=2, changes=["noise.eta=0.2"])
    assert [arm.load().noise.eta for arm in changed.arms] == [0.2, 0.2]
    # An iteration: 3 prompts, 2 steps with 4 images a stride; the coarse path of the second is the fine one.
    runs = plan_runs(changed, budget, Path("out"), {})
    assert [(run.arm.name, run.seed, run.iterations) for run in runs] == [
        ("small", 0, 3),
        ("small", 1, 3),
        ("two", 0, 2),
        ("two", 1, 2),
    ]
    assert runs[0].recipe.output == "out/small"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("arms:", "amrs:", r"table\.yaml:5: unknown setting 'amrs'; did you mean 'arms'\?"),
        ("seeds:", "seed:", r"table\.yaml:3: unknown setting 'seed'; did you mean 'seeds'\?"),
        (
            "name: two",
            "nam: two",
            r"table\.yaml:7: unknown setting 'arms\.1\.nam'; did you mean 'arms\.1\.name'",
        ),
        ("name: two", "name: one", r"table\.yaml:7: arms\.1\.name: 'one' is the name of another arm"),
        ("recipe: small.yaml\n", "", r"table\.yaml:5: arms\.0: arm 'one' has no recipe"),
        ("recipe: small", "recipe: nowhere", r"table\.yaml:6: arm 'one': nowhere\.yaml: no such file"),
        (
            "train.learning_rate: 0.5",
            "train.learning_rat: 0.5",
            r"table\.yaml:8: arm 'two': override '.*': unknown setting.*did you mean 'train.learning_rate'",
        ),
        ("evaluation.prompts: 12", "evaluation.prompts: 0", r"table\.yaml:4: arm 'one': .*at least 1"),
        ("[4, 7]", "[4, 4]", r"table\.yaml:3: seeds: 4 stands there more than once"),
        ("train.learning_rate: 0.5", "seed: 3", r"table\.yaml:8: arm 'two': .*sets this itself"),
        ("evaluation.prompts: 12", "train.iterations: 9", r"table\.yaml:4: arm 'one': .*leave it out"),
        ("nfe=1000", "nfe=50", r"table\.yaml:6: arm 'one': one iteration costs 72 velocity evaluations"),
        ("nfe=1000", "steps=50", r"table\.yaml:2: got 'steps=50'; expected such as nfe=4e5"),
        ("[1, 2]", "[1, 9]", r"table\.yaml:8: arm 'two': .*stride 9 is longer than the grid"),
        ("seeds: [4, 7]", "beside: [g2rp]", r"no published table 'g2rp'; expected one of g2rpo"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_line(old: str, new: str, message: str) -> None:
    assert old in FILE

    def plan() -> None:
        comparison, budget = adjusted(read(FILE.replace(old, new)))
        plan_runs(comparison, budget, Path("out"), {})

    with pytest.raises(InputError, match=message) as told:
        plan()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no settings; expected a recipe, or a comparison with arms"),
        ("arms: []\nrecipe: small.yaml\n", r":1: arms is \[\]; expected at least 1 in the list"),
        ("arms: [{}]\nrecipe: small.yaml\n", r"'arms\.0\.name' is required and missing"),
        ("- arms\n", "holds no settings"),
    ],
)
def test_an_empty_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("recipes", "arms", "message"),
    [
        ([], [], "compare needs recipes, arms or a comparison file"),
        (["small.yaml", "small.yaml"], [], "2 arms are called 'small'; name them apart"),
        (["nowhere.yaml"], [], r"nowhere\.yaml: no such file; expected a recipe or a comparison"),
        (["small.yaml"], ["two small.yaml"], "--arm 'two small.yaml': expected NAME: RECIPE"),
        (["small.yaml"], ["two: 'small.yaml"], "no closing quotation"),
        (["small.yaml"], ["two:"], "expected NAME: RECIPE"),
        (["table.yaml", "small.yaml"], [], r"table\.yaml: is a comparison file; expected it alone"),
    ],
)
def test_words_that_name_no_comparison_are_refused(recipes: list[str], arms: list[str], message: str) -> None:
    Path("table.yaml").write_text(FILE)
    with pytest.raises(InputError, match=message):
        from_words(recipes, arms)


def test_a_comparison_without_a_budget_is_refused() -> None:
    with pytest.raises(InputError, match="needs a budget, such as --budget nfe=4e5"):
        adjusted(from_words(["small.yaml"], []))


def _committed() -> list[Path]:
    return sorted((ROOT / "comparisons").rglob("*.yaml"))


@pytest.mark.parametrize(
    "file", [each for each in _committed() if each.parent.name != "levels"], ids=lambda file: file.stem
)
def test_committed_comparisons_are_whole_and_fill_their_budget(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    comparison, budget = adjusted(read_comparison(file))
    for run in plan_runs(comparison, budget, Path("out"), {}):
        total = run.costs()[-1].velocity_evaluations
        assert total <= budget.amount
        assert total + total / run.iterations * 1.5 > budget.amount, run.name
        table = run.recipe.noise.table
        assert table is None or (ROOT / table).is_file()
        assert run.recipe.algorithm.model_dump().get("num_steps") == 6
