"""Prompt files as users write them, and which prompts an iteration draws."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowcredit.errors import InputError
from flowcredit.prompts import PromptSet, iteration_prompts, load_prompts

CASES = Path(__file__).parent / "cases" / "prompts"


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("bom.txt", ("a red circle", "a blue square")),
        ("no_final_newline.txt", ("a red circle", "a blue square")),
        ("commas.txt", ("a red circle, a blue square, and a green triangle, in a row",)),
    ],
)
def test_text_files_give_one_prompt_a_line(name: str, prompts: tuple[str, ...]) -> None:
    loaded = load_prompts(CASES / name)
    assert loaded.prompts == prompts
    assert loaded.skipped_blank == 0


def test_three_hundred_words_are_one_prompt() -> None:
    loaded = load_prompts(CASES / "three_hundred_words.txt")
    assert len(loaded) == 1
    assert len(loaded.prompts[0].split()) >= 300


def test_blank_lines_are_skipped_and_counted_in_one_line() -> None:
    loaded = load_prompts(CASES / "crlf_blank_lines.txt")
    assert loaded.prompts == ("a red circle", "a blue square")
    assert loaded.describe() == f"2 prompts from {CASES / 'crlf_blank_lines.txt'} (3 blank lines skipped)"


def test_equal_prompts_stay_apart_with_their_own_columns() -> None:
    loaded = load_prompts(CASES / "duplicates.jsonl")
    assert loaded.prompts == ("a red circle", "a red circle", "a blue square")
    assert loaded.columns == {"answer": (1, 2, 3)}
    assert loaded.take([1, 1, 0]).columns == {"answer": (2, 2, 1)}


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("latin1.txt", 2, ["not UTF-8", "iconv -f LATIN1 -t UTF-8"]),
        ("broken_line.jsonl", 2, ["not valid JSON", "column"]),
        ("missing_key.jsonl", 2, ['no "prompt"', '"text"']),
    ],
)
def test_a_bad_line_is_refused_with_its_number(name: str, line: int, told: list[str]) -> None:
    with pytest.raises(InputError) as refusal:
        load_prompts(CASES / name)
    message = str(refusal.value)
    assert message.startswith(f"{CASES / name}:{line}: ")
    assert "\n" not in message
    assert all(part in message for part in told)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(InputError, match=r"empty\.txt: holds no prompts"):
        load_prompts(CASES / "empty.txt")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("blank.txt", b" \r\n\t\n", "holds no prompts"),
        ("wide.txt", "a red circle".encode("utf-16"), "iconv -f UTF-16"),
        ("late.txt", b"\xef\xbb\xbfone\ntwo\nthr\xe9e", r"late\.txt:3: not UTF-8 \(byte 0xe9\)"),
        ("list.jsonl", b'{"prompt": "a"}\n["b"]', r"list\.jsonl:2: expected a JSON object .* got a list"),
        ("number.jsonl", b'{"prompt": 3}', r'number\.jsonl:1: "prompt" must be a text .* got a number'),
        ("blank.jsonl", b'{"prompt": " "}', r"got an empty text"),
        ("table.xlsx", b"prompt\na", r"expected a \.txt"),
        (
            "head.csv",
            b"caption,id\na,1\n",
            r"head\.csv:2: no \"prompt\" .* \"caption\", \"id\".*prompts\.column",
        ),
        ("ragged.csv", b"prompt,id\n\na red, round circle,1\n", r"ragged\.csv:3: 3 fields, .* 2 columns"),
        ("twice.csv", b"prompt,id,id\na,1,2\n", r"twice\.csv:1: the column 'id' is named twice"),
        ("quote.csv", b'prompt\n"a\nb', r"quote\.csv:2: not readable as separated values"),
        ("only_a_header.csv", b"prompt,id\n", "holds no prompts"),
        ("object.json", b'{"prompt": "a"}', r"holds an object; expected a list"),
        ("broken.json", b'["a",\n "b"', r"broken\.json:2: not valid JSON"),
        ("mixed.json", b'["a", 3]', r"mixed\.json: entry 2: expected a JSON object .* got a number"),
        ("torn.parquet", b"PAR1", r"torn\.parquet: not readable as parquet"),
    ],
)
def test_other_bad_files_are_refused(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=told):
        load_prompts(tmp_path / name)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_prompts(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InputError, match=r"a folder without \.parquet files \(it holds nothing\)"):
        load_prompts(tmp_path / "folder.txt")


def test_lines_end_at_line_ends_alone(tmp_path: Path) -> None:
    """U+2028 and U+0085 are text in JSON and in a prompt, not the end of a line."""
    file = tmp_path / "separators.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\r{"prompt": "c\x85d"}\r\n', encoding="utf-8", newline="")
    assert load_prompts(file).prompts == ("a\u2028b", "c\x85d")


def test_separated_values_keep_their_columns_and_quoted_texts(tmp_path: Path) -> None:
    file = tmp_path / "drawbench.csv"
    file.write_text(
        '\ufeffPrompts,Category\r\n"one, two\nand ""three""",Text\r\n\r\nfour,Colors\r\n', newline=""
    )
    loaded = load_prompts(file, "Prompts")
    assert loaded.prompts == ('one, two\nand "three"', "four")
    assert loaded.columns == {"Category": ("Text", "Colors")}
    assert loaded.skipped_blank == 1
    tabbed = tmp_path / "same.tsv"
    tabbed.write_text("prompt\tid\na, b\t7\n")
    assert load_prompts(tabbed).columns == {"id": ("7",)}


def test_a_list_in_one_json_file_is_read_as_texts_or_objects(tmp_path: Path) -> None:
    file = tmp_path / "anime.json"
    file.write_text('["a cat", {"prompt": "a dog", "id": 2}]')
    loaded = load_prompts(file)
    assert loaded.prompts == ("a cat", "a dog")
    assert loaded.columns == {"id": (None, 2)}


def parquet(file: Path, **columns: list[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), file)


def test_a_folder_of_parquet_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    parquet(tmp_path / "train-00001-of-00002.parquet", caption=["c"], tags=[["x", "y"]], jpg=[b"\xff\xd8"])
    parquet(tmp_path / "train-00000-of-00002.parquet", caption=["a", "b"], tags=[[], None], jpg=[b"", b""])
    loaded = load_prompts(tmp_path, "caption")
    assert loaded.prompts == ("a", "b", "c")
    assert loaded.columns == {"tags": ([], None, ["x", "y"])}
    with pytest.raises(InputError, match=r"00000-of-00002\.parquet: row 1: no \"prompt\""):
        load_prompts(tmp_path)
    parquet(tmp_path / "train-00002-of-00002.parquet", caption=["d", None])
    with pytest.raises(InputError, match=r"row 2: \"caption\" must be a text that is not empty, got null"):
        load_prompts(tmp_path, "caption")


def test_a_data_set_of_the_hub_is_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache's own layout, offline: what a user has who fetched the data set before."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    data = tmp_path / "datasets--someone--prompts"
    revision = "0123456789012345678901234567890123456789"
    (data / "refs").mkdir(parents=True)
    (data / "refs" / "main").write_text(revision)
    parquet(data / "snapshots" / revision / "data" / "train-00000-of-00001.parquet", prompt=["a", "b"])
    parquet(data / "snapshots" / revision / "data" / "test-00000-of-00001.parquet", prompt=["c"])
    assert load_prompts("hf:someone/prompts#train").prompts == ("a", "b")
    assert load_prompts(f"hf:someone/prompts@{revision}#test").prompts == ("c",)
    with pytest.raises(InputError, match=r"no split 'validation' among its files; there are: test, train"):
        load_prompts("hf:someone/prompts#validation")
    with pytest.raises(InputError, match=r"hf:someone/other: this data set cannot be fetched"):
        load_prompts("hf:someone/other")


def test_a_key_that_some_rows_lack_is_none_there(tmp_path: Path) -> None:
    file = tmp_path / "ragged.jsonl"
    file.write_text('{"prompt": "a", "task": "x"}\n{"prompt": "b", "count": 2}\n', encoding="utf-8")
    assert load_prompts(file).columns == {"task": ("x", None), "count": (None, 2)}


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="column 'task' has 1 values for 2 prompts"):
        PromptSet(("a", "b"), {"task": ("x",)})


@given(count=st.integers(1, 40), per=st.integers(1, 60), seed=st.integers(0, 2**63 - 1))
def test_iterations_read_epoch_after_epoch(count: int, per: int, seed: int) -> None:
    """Whatever the cut into iterations, each run of ``count`` draws is every row once."""
    iterations = -(-3 * count // per)
    stream = [row for i in range(iterations) for row in iteration_prompts(count, seed, i, per)]
    for epoch in range(3):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_the_draw_is_the_same_on_every_machine() -> None:
    """Recorded once: a change here changes every run."""
    recorded = [4, 3, 0, 1, 2, 5, 6, 2, 1, 0]
    assert iteration_prompts(7, 3, 0, 5) + iteration_prompts(7, 3, 1, 5) == recorded


def test_epochs_and_seeds_differ() -> None:
    first, second = iteration_prompts(50, 0, 0, 50), iteration_prompts(50, 0, 1, 50)
    assert first != second
    assert first != iteration_prompts(50, 1, 0, 50)
    assert first != list(range(50))


def test_fewer_prompts_than_an_iteration_needs_wrap_around() -> None:
    drawn = iteration_prompts(2, 0, 0, 5)
    assert sorted(drawn[:2]) == sorted(drawn[2:4]) == [0, 1]


@pytest.mark.parametrize(("count", "iteration", "per"), [(0, 0, 1), (1, 0, 0), (1, -1, 1)])
def test_impossible_draws_are_refused(count: int, iteration: int, per: int) -> None:
    with pytest.raises(ValueError, match=r"expected|from 0"):
        iteration_prompts(count, 0, iteration, per)
