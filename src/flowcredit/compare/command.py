"""``flowcredit compare``: from words to runs, and from runs to a page."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from flowcredit.compare.arms import Comparison, changed_in_all
from flowcredit.compare.budget import KINDS, Budget, parse_budget
from flowcredit.compare.processes import PATIENCE_S, Failure, Start, Task, run_tasks
from flowcredit.compare.runs import (
    Run,
    plan_file,
    plan_runs,
    read_paces,
    refuse_others,
    wait_until_free,
    write_plan,
    write_recipes,
)
from flowcredit.compare.screen import Screen
from flowcredit.compare.tasks import before_task, measured_pace, pace_task, run_task
from flowcredit.compare.upfront import check_arms
from flowcredit.console import say
from flowcredit.destinations import check_folder
from flowcredit.errors import InputError
from flowcredit.published import PUBLISHED


def adjusted(
    comparison: Comparison,
    budget: str | None = None,
    seeds: int | None = None,
    steps: Sequence[int] | None = None,
    changes: Sequence[str] = (),
) -> tuple[Comparison, Budget]:
    """A comparison as the options of the command line change it, and its budget. InputError without one."""
    comparison = changed_in_all(comparison, changes)
    if seeds is not None:
        comparison = replace(comparison, seeds=tuple(range(seeds)))
    if steps:
        comparison = replace(comparison, steps=tuple(dict.fromkeys(steps)))
    for name in comparison.beside:
        if name not in PUBLISHED:
            known = ", ".join(PUBLISHED)
            raise InputError(f"beside: there is no published table '{name}'; expected one of {known}")
    if budget is not None:
        return comparison, parse_budget(budget)
    if comparison.budget is None:
        named = ", ".join(f"{kind}= for {what}" for kind, what in KINDS.items())
        raise InputError(f"a comparison needs a budget, such as --budget nfe=4e5 ({named})")
    return comparison, parse_budget(comparison.budget, comparison.budget_from)


def compare_command(
    comparison: Comparison,
    budget: Budget,
    out: Path,
    parallel: int,
    start: Start,
    console: Console,
    run: bool = True,
) -> bool:
    """Run what is not done yet of a comparison into ``out``, and write its page; whether all went well.

    With ``run`` false only the page of what there is. Raises InputError for whatever cannot work before
    anything is written, and KeyboardInterrupt when it was stopped.
    """
    from flowcredit.report.parts import with_figures

    with_figures()
    for arm in comparison.arms:
        arm.load()
    if not run and not out.is_dir():
        raise InputError(f"--out {out}: there is no such comparison yet; leave out --page-only")
    check_folder(out, "--out")
    left = comparison.arms
    if budget.kind != "seconds" or read_paces(out):
        runs = plan_runs(comparison, budget, out, read_paces(out))
        refuse_others(out, runs, budget)
        left = tuple(arm for arm in left if not all(each.trained for each in runs if each.arm is arm))
    if run:
        check_arms(left)
    with _owned(out) if run else nullcontext():
        paces = _paces(comparison, budget, out, parallel, start, console, run)
        runs = plan_runs(comparison, budget, out, paces)
        refuse_others(out, runs, budget)
        if run:
            wait_until_free(runs, PATIENCE_S, lambda line: say(console, line))
            write_plan(out, budget, paces)
            write_recipes(runs)
        failures = _run(comparison, budget, runs, out, parallel, start, console) if run else []
        return _page(comparison, budget, runs, out, failures, console)


@contextmanager
def _owned(out: Path) -> Iterator[None]:
    """The folder, held by one command at a time."""
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(
            f"{out}: another comparison is at work there; wait for its end, or stop it"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _paces(
    comparison: Comparison,
    budget: Budget,
    out: Path,
    parallel: int,
    start: Start,
    console: Console,
    run: bool,
) -> dict[str, float]:
    """Seconds a velocity evaluation of each arm, where the budget is of seconds; measured once and kept."""
    if budget.kind != "seconds":
        return {}
    paces = read_paces(out)
    new = [arm for arm in comparison.arms if arm.slug not in paces]
    seed = comparison.seeds[0]
    if new and not run:
        raise InputError(f"{plan_file(out)}: has no pace of '{new[0].name}'; leave out --page-only")
    tasks = [pace_task(arm, seed, out) for arm in new]
    failures = _go(tasks, parallel, start, console)
    if failures:
        why, file = failures[0].why, failures[0].console_file
        raise InputError(f"{failures[0].name}, could not be measured: {why}; see {file}")
    return paces | {arm.slug: measured_pace(arm, seed, out) for arm in new}


def _run(
    comparison: Comparison,
    budget: Budget,
    runs: Sequence[Run],
    out: Path,
    parallel: int,
    start: Start,
    console: Console,
) -> list[Failure]:
    tasks = [run_task(each, comparison.steps) for each in _seeds_first(runs)]
    if comparison.steps:
        tasks.append(before_task(runs[0], out, comparison.steps))
    for line in _introduction(comparison, budget, runs, out, parallel):
        say(console, line)
    return _go(tasks, parallel, start, console)


def _go(tasks: Sequence[Task], parallel: int, start: Start, console: Console) -> list[Failure]:
    with Screen(console, tasks) as screen:
        return run_tasks(tasks, parallel, start, screen)


def _seeds_first(runs: Sequence[Run]) -> list[Run]:
    """Every arm's first seed, then every arm's second: a page of what there is compares all arms early."""
    seeds = list(dict.fromkeys(run.seed for run in runs))
    return sorted(runs, key=lambda run: seeds.index(run.seed))


def _introduction(
    comparison: Comparison, budget: Budget, runs: Sequence[Run], out: Path, parallel: int
) -> list[str]:
    lines = [
        f"{_count(comparison.arms, 'arm')} x {_count(comparison.seeds, 'seed')} at {budget.words} a run,"
        f" {parallel} at a time, in {out}"
    ]
    if len(comparison.arms) == 1:
        lines.append("  one arm has nothing beside it but the untrained model: name one more, or --arm")
    for arm in comparison.arms:
        mine = [run for run in runs if run.arm is arm]
        counts = sorted({run.iterations for run in mine})
        cost = mine[0].costs()[-1]
        lines.append(
            f"  {arm.name}: {' to '.join(dict.fromkeys(map(str, (counts[0], counts[-1]))))} iterations,"
            f" {cost.velocity_evaluations:,} velocity evaluations ({cost.rollout:,} in rollouts),"
            f" {cost.reward_calls:,} reward calls"
        )
        if counts[-1] < comparison.points:
            lines.append(
                f"    fewer than the {comparison.points} points that were asked for: it is evaluated after"
                " each of them"
            )
    return lines


def _page(
    comparison: Comparison,
    budget: Budget,
    runs: Sequence[Run],
    out: Path,
    failures: Sequence[Failure],
    console: Console,
) -> bool:
    from flowcredit.compare.page import write_page

    notes = [f"{failure.name} failed: {failure.why}; see {failure.console_file}" for failure in failures]
    for line in write_page(comparison, budget, runs, out, notes):
        say(console, line)
    return not failures


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def default_parallel(threads: int) -> int:
    """As many processes of so many threads as there are cores for."""
    return max(1, (os.cpu_count() or 1) // threads)
