"""The memory that a piece of work takes, on the CPU, allocation by allocation."""

from collections.abc import Callable

import torch


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that are in use at once while ``run`` lasts, beside those in use before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
