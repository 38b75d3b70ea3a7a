"""Checkpoints: whole or absent, checked when read, the older one used where the newest is damaged."""

import json
from pathlib import Path

import pytest
import torch

from flowcredit import checkpoint
from flowcredit.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
    tidy,
)
from flowcredit.errors import InputError


def save(folder: Path, iteration: int, keep_last: int = 3) -> Path:
    groups = {
        "weights": {"a": torch.full((3,), float(iteration))},
        "optimizer": {"a/step": torch.tensor(1.0)},
    }
    return save_checkpoint(folder, iteration, groups, {"totals": {"seconds": 1.5}}, keep_last)


def test_newest_is_found_and_older_ones_go(tmp_path: Path) -> None:
    for iteration in (1, 2, 9, 10, 11):
        save(tmp_path, iteration, keep_last=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["000010", "000011"]
    found, damaged = latest_checkpoint(tmp_path)
    assert found is not None
    assert damaged == []
    assert found.iteration == 11
    assert torch.equal(found.groups["weights"]["a"], torch.full((3,), 11.0))
    assert found.state == {"totals": {"seconds": 1.5}}


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") == (None, [])


@pytest.mark.parametrize("fault", ["truncated", "flipped", "missing", "no state", "torn state"])
def test_damage_is_named_and_passed_over(tmp_path: Path, fault: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    file, state = newest / "weights.safetensors", newest / "state.json"
    content = file.read_bytes()
    if fault == "truncated":
        file.write_bytes(content[:-2])
    elif fault == "flipped":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif fault == "missing":
        file.unlink()
    elif fault == "no state":
        state.unlink()
    else:
        state.write_text(state.read_text()[:-20])
    found, damaged = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.iteration == 1
    (line,) = damaged
    assert "000002" in line
    assert ("state.json" if "state" in fault else "weights.safetensors") in line
    with pytest.raises(InputError):
        load_checkpoint(newest)


def test_a_save_that_is_cut_short_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(InputError, match=r"000002: cannot be written \(No space left on device\)"):
        save(tmp_path, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["000001"]
    monkeypatch.undo()
    found, damaged = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.iteration, damaged) == (1, [])
    save(tmp_path, 2)
    again, _ = latest_checkpoint(tmp_path)
    assert again is not None
    assert again.iteration == 2


def test_a_checkpoint_that_is_written_anew_is_never_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two renames, where neither the old one nor the new one is in its place."""
    save(tmp_path, 2)
    plain = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target.name == "000002":
            raise KeyboardInterrupt
        return plain(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
    assert not (tmp_path / "000002").exists()
    found, damaged = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.iteration, damaged) == (2, [])
    tidy(tmp_path, 2, keep_last=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["000002"]
    assert load_checkpoint(tmp_path / "000002").iteration == 2


def test_every_changed_bit_of_the_manifest_is_seen(tmp_path: Path) -> None:
    file = save(tmp_path, 7) / "state.json"
    content = file.read_bytes()
    assert load_checkpoint(file.parent).iteration == 7
    accepted = []
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            file.write_bytes(bytes(changed))
            try:
                found = load_checkpoint(file.parent)
            except InputError as error:
                assert "state.json" in str(error)  # noqa: PT017
                continue
            # Between tokens one blank is as good as another.
            assert (found.iteration, found.state) == (7, {"totals": {"seconds": 1.5}})
            accepted.append((content[place], changed[place]))
    assert set(accepted) <= {(a, b) for a in b" \n" for b in b" \n\t\r"}


def test_a_checkpoint_is_not_taken_for_another_iteration(tmp_path: Path) -> None:
    save(tmp_path, 2).rename(tmp_path / "000005")
    with pytest.raises(InputError, match=r"000005/state\.json: not the content that was written"):
        load_checkpoint(tmp_path / "000005")


def test_checkpoints_of_before_manifests_had_a_digest_are_read(tmp_path: Path) -> None:
    file = save(tmp_path, 2) / "state.json"
    content = json.loads(file.read_text())
    del content["own_sha256"]
    file.write_text(json.dumps(content))
    assert load_checkpoint(file.parent).iteration == 2


def test_going_back_past_damaged_ones_keeps_what_is_written_then(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        save(tmp_path, iteration, keep_last=4)
    for damaged in ("000003", "000004"):
        (tmp_path / damaged / "state.json").unlink()
    (tmp_path / ".000009.partial").mkdir()
    save(tmp_path, 3, keep_last=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["000003"]
    assert load_checkpoint(tmp_path / "000003").iteration == 3


def test_tidying_leaves_the_newest_and_what_is_damaged_beyond_them(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        save(tmp_path, iteration, keep_last=4)
    (tmp_path / ".000005.partial").mkdir()
    tidy(tmp_path, 3, keep_last=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["000002", "000003", "000004"]


def test_state_holds_a_hash_of_every_file(tmp_path: Path) -> None:
    folder = save(tmp_path, 4)
    recorded = json.loads((folder / "state.json").read_text())["sha256"]
    assert set(recorded) == {file.name for file in folder.glob("*.safetensors")}


def test_a_restored_optimizer_steps_like_the_one_that_was_saved(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        return layer, torch.optim.AdamW(layer.parameters(), lr=0.1)

    def step(layer: torch.nn.Linear, optimizer: torch.optim.AdamW, value: float) -> None:
        layer(torch.full((1, 3), value)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    layer, optimizer = make()
    for value in (1.0, -2.0):
        step(layer, optimizer, value)
    tensors = optimizer_tensors(optimizer, dict(layer.named_parameters()))
    folder = save_checkpoint(tmp_path, 2, {"optimizer": tensors, "weights": layer.state_dict()}, {}, 1)
    saved = load_checkpoint(folder)
    other, restored = make()
    other.load_state_dict(saved.groups["weights"])
    fresh_layer, fresh = make()
    fresh_layer.load_state_dict(saved.groups["weights"])
    restore_optimizer(restored, dict(other.named_parameters()), saved.groups["optimizer"])
    for each, its in ((layer, optimizer), (other, restored), (fresh_layer, fresh)):
        step(each, its, 0.5)
    assert torch.equal(layer.weight, other.weight)
    assert not torch.equal(layer.weight, fresh_layer.weight)
