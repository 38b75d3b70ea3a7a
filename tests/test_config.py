"""Recipes: what is read, what is refused and where the refusal points."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt, MinLen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from flowcredit.config import Recipe
from flowcredit.errors import InputError
from flowcredit.methods import METHODS, G2RPOSettings
from flowcredit.recipe_io import (
    SettingInfo,
    dump_recipe,
    list_settings,
    load_recipe,
    load_settings,
    recipe_diff,
)
from flowcredit.sections import NAME_ALONE, Section

MINIMAL = """\
name: demo
model: {path: "bundled:shapes"}
prompts:
  train: bundled:shapes/train
  heldout: bundled:shapes/heldout
algorithm: g2rpo
rewards:
  - shapes
  - name: clip
    options: {path: bundled:shapes-clip}
watch: [brightness]
train:
  iterations: 20
  mixed_precision: no
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(MINIMAL, encoding="utf-8")
    return file


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_short_recipe_gets_every_default(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    assert [reward.name for reward in recipe.rewards] == ["shapes", "clip"]
    assert recipe.rewards[1].options == {"path": "bundled:shapes-clip"}
    assert recipe.watch[0].name == "brightness"
    assert recipe.train.mixed_precision == "no"  # YAML 1.1 would have read false
    assert isinstance(recipe.algorithm, G2RPOSettings)
    assert recipe.algorithm.train_indices == (0, 1, 2, 3, 4, 5, 6, 7)


def test_a_byte_order_mark_and_windows_line_ends_are_read(minimal: Path) -> None:
    plain = load_recipe(minimal)
    minimal.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_recipe(minimal) == plain


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("train.learning_rate=1e-5", lambda r: r.train.learning_rate == 1e-5),
        ("train.learning_rate=.5", lambda r: r.train.learning_rate == 0.5),
        ("algorithm.strides=[1,2]", lambda r: r.algorithm.strides == (1, 2)),
        ("algorithm.num_steps=8", lambda r: r.algorithm.train_indices == (0, 1, 2, 3)),
        ("algorithm.train_steps=[5, 2]", lambda r: r.algorithm.train_indices == (2, 5)),
        ("rewards.0.weight=2", lambda r: [x.weight for x in r.rewards] == [2.0, 1.0]),
        ("rewards.1.options.path=x", lambda r: r.rewards[1].options == {"path": "x"}),
        ("rewards=[clip]", lambda r: [x.name for x in r.rewards] == ["clip"]),
        ("watch=[]", lambda r: r.watch == ()),
        ("evaluation.num_steps=null", lambda r: r.evaluation.num_steps is None),
        ("evaluation.num_steps=", lambda r: r.evaluation.num_steps is None),
        ("grid={kind: scheduler}", lambda r: r.grid.kind == "scheduler"),
        ("model.path=C:\\models", lambda r: r.model.path == "C:\\models"),
        ("name='1e-5'", lambda r: r.name == "1e-5"),
    ],
)
def test_overrides_replace_one_value(minimal: Path, override: str, read: Any) -> None:
    recipe = load_recipe(minimal, [override])
    assert read(recipe)
    wanted = override.partition("=")[0]
    for change in recipe_diff(load_recipe(minimal), recipe):
        assert change.setting.startswith(wanted) or wanted.startswith(change.setting)


def test_the_last_override_wins(minimal: Path) -> None:
    recipe = load_recipe(minimal, ["seed=1", "algorithm.group_size=4", "algorithm=g2rpo", "seed=2"])
    assert recipe.seed == 2
    assert recipe.algorithm.group_size == G2RPOSettings().group_size


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.learning_rat=1", "train.learning_rate"),
        ("trian.learning_rate=1", "train"),
        ("learning_rate=1", "train.learning_rate"),
        ("algorithm.stride=1", "algorithm.strides"),
        ("rewards.1.wieght=3", "rewards.1.weight"),
        ("noise.kind=flow_sed", "flow_sde"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(minimal: Path, override: str, nearest: str) -> None:
    message = refusal(minimal, override)
    assert message.startswith(f"override '{override}': ")
    assert f"did you mean '{nearest}'?" in message


def test_an_unknown_name_like_no_other_gets_the_list(minimal: Path) -> None:
    assert refusal(minimal, "grid.zzz=1").endswith("unknown setting 'grid.zzz'; known here: kind, shift")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("algorithm.group_size=1", "algorithm.group_size is 1; expected at least 2"),
        (
            "algorithm.train_steps=[3, 15]",
            "step 15 of 16 cannot be trained (its noise would stay in the image)",
        ),
        ("algorithm.train_steps=[16]", "step 16 of 16 cannot be trained; expected 0 to 14"),
        ("algorithm.train_steps=[-1]", "step -1 of 16 cannot be trained"),
        ("algorithm.train_steps=[]", "algorithm.train_steps is []; expected 'first_half' or at least 1"),
        ("algorithm.train_steps=4", "algorithm.train_steps is 4; expected 'first_half' or a list"),
        ("algorithm.train_steps=[1, a]", 'algorithm.train_steps.1 is "a"; expected a whole number'),
        ("algorithm.train_steps=[1, 1]", "algorithm.train_steps: 1 stands there more than once"),
        ("algorithm.strides=[1, 0]", "algorithm.strides.1 is 0; expected at least 1"),
        ("algorithm.strides=[2, 2]", "algorithm.strides: 2 stands there more than once"),
        (
            "algorithm.strides=[17]",
            "algorithm.strides: stride 17 is longer than the grid; expected at most 16",
        ),
        ("algorithm=ppo", "algorithm is \"ppo\"; expected 'g2rpo', 'dense_grpo', 'flow_grpo'"),
        ("train.clip_range=0", "train.clip_range is 0; expected more than 0"),
        ("train.learning_rate=.inf", "train.learning_rate is Infinity; expected"),
        ("train.learning_rate=.nan", "train.learning_rate is NaN; expected"),
        ("train.iterations=1.5", "train.iterations is 1.5; expected a whole number"),
        ("train.gradient_checkpointing=1", "train.gradient_checkpointing is 1; expected true or false"),
        ("train.betas=[0.9]", "train.betas is [0.9]; expected at least 2 in the list"),
        ("train.betas=[0.9, 0.9, 0.9]", "train.betas is [0.9, 0.9, 0.9]; expected at most 2 in the list"),
        (
            "train.warmup_iterations=20",
            "train.warmup_iterations: 20 leaves none of the 20 of train.iterations after the warm-up",
        ),
        ("train=", "train is null; expected settings below it"),
        ("noise={kind: cps, eta: 1.5}", "noise.eta: Flow-CPS cannot use a level of 1.5; expected at most 1"),
        ("noise.kind=table", "noise.table: noise kind 'table' is given no file of levels"),
        ("noise={table: levels.yaml, kind: cps}", "noise.table: noise kind 'cps' reads no table"),
        ("rewards=[]", "rewards: there is none to train; expected at least 1 in the list"),
        ("rewards=[shapes, shapes]", "rewards: 'shapes' stands there more than once"),
        ("watch=[other, shapes]", "is measured; expected it to be left out, as in watch=[other]"),
        ("rewards.2.weight=1", "'2' is no place in the list 'rewards'; its places: 0 to 1"),
        ("rewards.-1.weight=1", "'-1' is no place in the list 'rewards'"),
        ("name=../elsewhere", 'name is "../elsewhere"; expected a text that matches'),
        ("name.first=1", "name is \"demo\" and holds no 'first'"),
        ("train.iterations.x=1", "train.iterations is 20 and holds no 'x'"),
        ("seed", "expected setting=value"),
        ("=1", "expected setting=value"),
        ("seed..x=1", "expected setting=value"),
        ("algorithm.strides=[1", "not valid YAML"),
    ],
)
def test_bad_overrides_are_refused_by_name(minimal: Path, override: str, told: str) -> None:
    message = refusal(minimal, override)
    assert message.startswith(f"override '{override}': ")
    assert told in message


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        ("  iterations: 20", "  iteratons: 20", 13, "did you mean 'train.iterations'?"),
        ("  iterations: 20", "  iterations: many", 13, 'train.iterations is "many"; expected a whole number'),
        ("  - shapes", "  - 7", 8, "rewards.0 is 7; expected settings below it"),
        (
            "algorithm: g2rpo",
            "algorithm:\n  num_steps: 4\n  train_steps:\n    - 0\n    - 3",
            8,
            "step 3 of 4",
        ),
        ("    options:", "    option:", 10, "did you mean 'rewards.1.options'?"),
        ("  heldout: bundled:shapes/heldout\n", "", 3, "'prompts.heldout' is required and missing"),
        ("name: demo", "nmae: demo", 1, "unknown setting 'nmae'; did you mean 'name'? (and 1 more)"),
        ("watch: [brightness]", "name: again", 11, "'name' stands here again after line 1"),
        ("watch: [brightness]", "watch: [brightness", 12, "not valid YAML"),
        ("watch: [brightness]", "1: x", 11, "a name must be a text, got '1'"),
        ("watch: [brightness]", "watch: !!python/name:os.system", 11, "is not read; write a plain value"),
        ("watch: [brightness]", "watch: *none", 11, "not valid YAML"),
        ("watch: [brightness]", "---\nseed: 1", 11, "not valid YAML"),
        ("watch: [brightness]", "train.iterations: 3", 11, "each dot is a level: train: {iterations: ...}"),
    ],
)
def test_refusals_name_file_and_line(minimal: Path, old: str, new: str, line: int, told: str) -> None:
    assert MINIMAL.count(old) == 1
    minimal.write_text(MINIMAL.replace(old, new), encoding="utf-8")
    message = refusal(minimal)
    assert message.startswith(f"{minimal}:{line}: ")
    assert told in message


@pytest.mark.parametrize("content", ["", "# nothing\n", "demo\n", "- name: demo\n", "a: &x [*x]\n"])
def test_files_that_hold_no_recipe_are_refused(minimal: Path, content: str) -> None:
    minimal.write_text(content, encoding="utf-8")
    assert refusal(minimal).startswith(str(minimal))


def test_an_override_mends_the_file(minimal: Path) -> None:
    minimal.write_text(MINIMAL.replace("iterations: 20", "iterations: many"), encoding="utf-8")
    assert load_recipe(minimal, ["train.iterations=3"]).train.iterations == 3


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    # What YAML of one version or the other reads as something else, and what needs quoting.
    | st.sampled_from(
        ["1e-5", "no", "null", "~", "", " x ", "2020-01-01", "0x1f", "1_000", "1:30", "a: b", "# c", "é"]
    )
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc.:- ", max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    options=st.dictionaries(st.sampled_from(["a", "no", "1", ""]), JSON, max_size=3),
    rate=st.floats(1e-12, 0.5),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_dumped_recipe_reads_back_equal(minimal: Path, options: dict[str, Any], rate: float) -> None:
    data = load_recipe(minimal).model_dump()
    data["rewards"][0]["options"] = options
    data["train"]["learning_rate"] = rate
    recipe = Recipe.model_validate(data)
    dumped = minimal.with_name("dumped.yaml")
    dumped.write_text(dump_recipe(recipe), encoding="utf-8")
    back = load_recipe(dumped)
    assert back == recipe
    assert recipe_diff(back, recipe) == []


def test_a_diff_names_each_changed_setting(minimal: Path) -> None:
    before = load_recipe(minimal)
    after = load_recipe(
        minimal, ["seed=3", "algorithm.strides=[1]", "rewards=[clip]", "train.learning_rate=1e-5"]
    )
    assert [str(change) for change in recipe_diff(before, after)] == [
        "seed: 0 -> 3",
        "algorithm.strides: [1, 2, 3] -> [1]",
        'rewards.0.name: "shapes" -> "clip"',
        'rewards.1.name: "clip" -> null',
        'rewards.1.options: {"path": "bundled:shapes-clip"} -> null',
        "rewards.1.weight: 1.0 -> null",
        "train.learning_rate: 2e-06 -> 1e-05",
    ]


def test_a_list_that_was_empty_differs_by_what_is_in_it(minimal: Path) -> None:
    none, one = load_recipe(minimal, ["watch=[]"]), load_recipe(minimal, ["watch=[sharpness]"])
    told = ['watch.0.name: null -> "sharpness"', "watch.0.options: null -> {}"]
    assert [str(change) for change in recipe_diff(none, one)] == told
    assert {change.setting for change in recipe_diff(one, none)} == {"watch.0.name", "watch.0.options"}


def test_settings_cannot_be_changed(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.train.iterations = 3


def _sections(kind: type[Section]) -> list[type[Section]]:
    found = [kind]
    for each in kind.__subclasses__():
        found += _sections(each)
    return [each for each in found if each.__module__.startswith(("flowcredit.config", "flowcredit.methods"))]


def _inside(annotation: Any) -> list[Any]:
    """An annotation's plain types and constraints, those of tuple items and alternatives too."""
    parts = getattr(annotation, "__args__", ())
    found = [each for part in parts for each in _inside(part)] if parts else [annotation]
    for each in getattr(annotation, "__metadata__", ()):
        found += getattr(each, "metadata", [each])
    return found


@pytest.mark.parametrize("section", _sections(Section), ids=lambda section: section.__name__)
def test_every_number_is_bounded_and_no_text_is_empty(section: type[Section]) -> None:
    for name, field in section.model_fields.items():
        rules = [*field.metadata, *_inside(field.annotation)]
        # Lists of grid steps are held to the grid.
        if (int in rules or float in rules) and name not in {"train_steps", "split_steps"}:
            assert any(isinstance(rule, Ge | Gt) for rule in rules), f"{name} has no lower bound"
            assert any(isinstance(rule, Le | Lt) for rule in rules), f"{name} has no upper bound"
        # An empty negative prompt is one, and the usual.
        if str in rules and name not in {"options", "negative_prompt"}:
            pattern = any(getattr(rule, "pattern", None) for rule in rules)
            assert pattern or any(isinstance(rule, MinLen) for rule in rules), f"{name} may be empty"


@pytest.mark.parametrize("setting", list_settings(), ids=lambda setting: setting.setting)
def test_every_setting_has_a_sentence(setting: SettingInfo) -> None:
    assert len(setting.description.split()) >= 4
    assert setting.description.endswith(".")
    assert (setting.default is None) == setting.description.endswith("Required.")


@pytest.mark.parametrize(
    "setting",
    [s for s in list_settings() if s.default and s.default[0].isdigit()],
    ids=lambda setting: setting.setting,
)
def test_a_text_is_no_number(minimal: Path, setting: SettingInfo) -> None:
    section, _, name = setting.setting.partition(".")
    override = f"{setting.setting}='1'"
    if section == "algorithm":
        override = f"algorithm={{name: {setting.description.split(':')[0]}, {name}: '1'}}"
    assert f'{setting.setting} is "1"; expected ' in refusal(minimal, override)


def _leaf_names(value: Any, prefix: str = "") -> list[str]:
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    below = [name for key, item in items for name in _leaf_names(item, f"{prefix}.{key}")]
    plain = isinstance(value, list) and not any(isinstance(item, dict) for item in value)
    return below if below and not plain else [prefix[1:]]


def test_the_list_of_settings_is_what_a_recipe_holds(minimal: Path) -> None:
    listed = list_settings()
    held = set()
    for method in METHODS:
        recipe = load_recipe(minimal, ["rewards=[shapes]", f"algorithm={method}"])
        names = _leaf_names(recipe.model_dump(mode="json"))
        others = [s for s in listed if s.setting.startswith("algorithm.")]
        mine = [s.setting for s in others if s.description.startswith(f"{method}: ")]
        assert sorted(mine) == sorted(name for name in names if name.startswith("algorithm."))
        held |= set(names)
    assert held == {setting.setting for setting in listed}


class Other(Section):
    name: Literal["other"]
    depth: int = 3


class TwoMethods(Section):
    algorithm: Annotated[Annotated[G2RPOSettings | Other, Field(discriminator="name")], NAME_ALONE] = (
        G2RPOSettings()
    )


def test_a_second_method_is_a_second_class(tmp_path: Path) -> None:
    """Settings of several methods: told apart by name, refused and suggested for the named one alone."""
    file = tmp_path / "two.yaml"
    file.write_text("algorithm:\n  name: other\n  dept: 2\n", encoding="utf-8")
    with pytest.raises(
        InputError,
        match=r"two\.yaml:3: unknown .*\.dept' of algorithm other .*; did you mean 'algorithm\.depth'",
    ):
        load_settings(TwoMethods, file)
    file.write_text("algorithm: other\n", encoding="utf-8")
    assert load_settings(TwoMethods, file, ["algorithm.depth=5"]).algorithm == Other(name="other", depth=5)
    with pytest.raises(InputError, match=r"algorithm\.group_size is 1; expected at least 2"):
        load_settings(TwoMethods, file, ["algorithm.name=g2rpo", "algorithm.group_size=1"])
    with pytest.raises(InputError, match="'g2rpo', 'other'"):
        load_settings(TwoMethods, file, ["algorithm=third"])


def test_settings_of_adapters_are_refused_where_there_are_none(minimal: Path) -> None:
    assert "weights.rank: 8 is for adapters, but method 'full' has none" in refusal(minimal, "weights.rank=8")
    assert load_recipe(minimal, ["weights.method=lora", "weights.rank=8"]).weights.rank == 8
    # As a run that trained all weights wrote it when the targets still had one default.
    resolved = "weights={method: full, rank: 64, alpha: 128.0, targets: [to_q, to_k, to_v, to_out.0]}"
    assert load_recipe(minimal, [resolved]).weights.method == "full"


def test_settings_of_few_values_are_listed_with_them() -> None:
    told = {each.setting: each.description for each in list_settings()}
    assert told["grid.kind"].endswith("One of shifted_linear, resolution_shift, scheduler.")
    assert "One of" not in told["train.learning_rate"]
