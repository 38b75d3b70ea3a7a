"""Damages what a stopped run left on the disk, and fills the disk under a run at work."""

import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from survival_kill import ITERATIONS, Reference, reference
from survival_lives import RUN, Aim, Life, full_from, live
from survival_sameness import differences
from survival_world import Cell

FAULTS = ("truncated", "bit flipped", "deleted", "emptied", "of another checkpoint")
ROOM = (0, 1, 60, 400, 3000)
"""Bytes that a file may still hold on a full disk."""


@dataclass(frozen=True)
class Stopped:
    """A run killed as it began to write its last checkpoint: two lie there, and its whole log."""

    reference: Reference
    folder: Path

    @property
    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted((self.folder / RUN / "checkpoints").glob("0*"))


@cache
def stopped(world: Path, cell: Cell) -> Stopped:
    """Kill a run of the cell there. SystemExit where it does not come to it."""
    ref = reference(world, cell)
    folder = world / "stopped" / ref.cell.name
    folder.mkdir(parents=True)
    life = live(folder, ref.recipe, Aim(0.0, 1, f"/.{ITERATIONS:06d}.partial"))
    found = Stopped(ref, folder)
    if not life.killed or len(found.checkpoints) != 2:
        raise SystemExit(f"{ref.cell}: could not be stopped at its last checkpoint:\n{life.said}")
    return found


def corrupt(
    cells: Sequence[Cell], trials: int, seed: int, world: Path, counts: Counter[str], wrong: list[str]
) -> None:
    """Damage the newest checkpoint, at times all of them or the log, and resume; as `kill_until`."""
    for trial in range(trials):
        rng = random.Random(f"{seed}/{trial}")
        left = stopped(world, cells[trial % len(cells)])
        folder = _fresh_copy(left.folder, world / "damaged")
        what = ("newest", "newest", "newest", "all", "log")[trial % 5]
        if what == "newest":
            found = _newest(left, folder, rng, counts)
        elif what == "all":
            found = _all(left, folder, rng, counts)
        else:
            found = _log(left, folder, rng, counts)
        counts["trials"] += 1
        wrong += [f"{left.reference.cell}, trial {trial}: {line}" for line in found]


def _newest(left: Stopped, folder: Path, rng: random.Random, counts: Counter[str]) -> list[str]:
    older, newest = (folder / path.relative_to(left.folder) for path in left.checkpoints)
    file, fault = _damage(newest, older, rng)
    life = live(folder, left.reference.recipe)
    counts[f"{fault}"] += 1
    wrong = [] if life.code == 0 else [f"{file.name} {fault}: exit code {life.code}: {_end(life)}"]
    if f"{newest.name}/{file.name}" not in life.said:
        wrong.append(f"{file.name} {fault}: not named")
    if f"after iteration {int(older.name)}" not in life.said:
        wrong.append(f"{file.name} {fault}: the checkpoint before was not taken")
    return wrong + differences(left.reference.folder, folder)


def _all(left: Stopped, folder: Path, rng: random.Random, counts: Counter[str]) -> list[str]:
    older, newest = (folder / path.relative_to(left.folder) for path in left.checkpoints)
    kept = folder.parent / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(older, kept / older.name)
    damaged = [_damage(newest, kept / older.name, rng), _damage(older, newest, rng)]
    before = _contents(folder / RUN)
    life = live(folder, left.reference.recipe)
    counts["every checkpoint damaged"] += 1
    wrong = _refused(life)
    wrong += [f"{file} {fault}: not named" for file, fault in damaged if file.name not in life.said]
    if _contents(folder / RUN) != before:
        wrong.append("a refused run was changed")
    return wrong


def _log(left: Stopped, folder: Path, rng: random.Random, counts: Counter[str]) -> list[str]:
    """The log has no digest: the run goes on whatever it holds, and ends in the same but for the log."""
    fault = rng.choice(("truncated", "bit flipped", "deleted", "emptied"))
    _spoil(folder / RUN / "log.jsonl", fault, rng)
    life = live(folder, left.reference.recipe)
    counts["log damaged"] += 1
    wrong = [] if life.code == 0 else [f"log {fault}: exit code {life.code}: {_end(life)}"]
    return wrong + [line for line in differences(left.reference.folder, folder) if line != "log.jsonl"]


def _damage(folder: Path, other: Path, rng: random.Random) -> tuple[Path, str]:
    """One file of a checkpoint, spoilt; which, and how."""
    file = folder / rng.choice(sorted(each.name for each in folder.iterdir()))
    fault = rng.choice(FAULTS)
    if fault == "of another checkpoint":
        shutil.copyfile(other / file.name, file)
    else:
        _spoil(file, fault, rng)
    return file, fault


def _spoil(file: Path, fault: str, rng: random.Random) -> None:
    content = file.read_bytes()
    if fault == "truncated":
        file.write_bytes(content[: rng.randrange(len(content))])
    elif fault == "emptied":
        file.write_bytes(b"")
    elif fault == "deleted":
        file.unlink()
    else:
        file.write_bytes(_flipped(content, file.suffix, rng))


def _flipped(content: bytes, suffix: str, rng: random.Random) -> bytes:
    """One bit is another; in JSON none that only makes another blank of a blank."""
    while True:
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        if suffix != ".json":
            return bytes(changed)
        try:
            if json.loads(bytes(changed)) != json.loads(content):
                return bytes(changed)
        except ValueError:
            return bytes(changed)


def fill(
    cells: Sequence[Cell], trials: int, seed: int, world: Path, counts: Counter[str], wrong: list[str]
) -> None:
    """Fill the disk at any operation of a run; it must stop in one line, lose nothing, and go on later."""
    for trial in range(trials):
        rng = random.Random(f"{seed}/{trial}")
        ref = reference(world, cells[trial % len(cells)])
        folder = world / "full"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        found = []
        for operation in (rng.randint(1, ref.operations), rng.randint(1, 20)):
            life = live(folder, ref.recipe, within=full_from(operation, rng.choice(ROOM)))
            if life.code == 0:
                counts["finished all the same"] += 1
                break
            counts[f"stopped at {_place(life)}"] += 1
            found += _refused(life) + _unwhole(folder)
        else:
            life = live(folder, ref.recipe)
            found += [] if life.code == 0 else [f"then exit code {life.code}: {_end(life)}"]
        counts["trials"] += 1
        found += differences(ref.folder, folder)
        wrong += [f"{ref.cell}, trial {trial}: {line}" for line in found]


def _place(life: Life) -> str:
    """The kind of file on which a run stopped, from its last line."""
    words = _end(life).removeprefix("flowcredit: ").partition(": ")[0]
    parts = Path(words).parts[2:]
    return parts[0] if parts else "its folder"


def _refused(life: Life) -> list[str]:
    """A refusal is one line, begun with the program's name, and exit code 2."""
    wrong = [] if life.code == 2 else [f"exit code {life.code} where 2 was due: {_end(life)}"]
    if "Traceback" in life.said or not _end(life).startswith("flowcredit: "):
        wrong.append(f"no line but: {life.said[-2000:]}")
    return wrong


def _unwhole(folder: Path) -> list[str]:
    """Checkpoints whose files are not what their manifests say."""
    wrong = []
    for manifest in folder.glob(f"{RUN}/checkpoints/0*/state.json"):
        for name, digest in json.loads(manifest.read_text())["sha256"].items():
            if hashlib.sha256((manifest.parent / name).read_bytes()).hexdigest() != digest:
                wrong.append(f"{manifest.parent / name}: not whole")
    return wrong


def _fresh_copy(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def _contents(folder: Path) -> dict[str, str]:
    files = [each for each in folder.rglob("*") if each.is_file() and each.name != ".lock"]
    return {str(each.relative_to(folder)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


def _end(life: Life) -> str:
    lines = life.said.strip().splitlines()
    return lines[-1] if lines else "said nothing"
