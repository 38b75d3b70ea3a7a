"""Ctrl-C, or a SIGTERM, while weights change: held back until nothing can be lost, and agreed on by all
processes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flowcredit.distributed import World
from flowcredit.processes import ending


class Interrupt:
    """A signal, held back while weights change: the first asks the loop to stop, the second stops at once.

    Of several processes none stops before all have agreed to, between two iterations. The KeyboardInterrupt
    has the number of the signal.
    """

    def __init__(self, world: World) -> None:
        self.asked = self.agreed = False
        self.world = world
        self.number = int(signal.SIGINT)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        if self.asked and self.world.size == 1:
            raise KeyboardInterrupt(number)
        self.asked = True

    def check(self) -> None:
        """Stop here if it was asked for: nothing is lost at this point."""
        if self.asked and self.world.size == 1:
            raise KeyboardInterrupt(self.number)

    def agree(self) -> None:
        """Stop here, all processes together, if any was asked to."""
        if any(self.world.largest([int(self.asked)])):
            self.agreed = True
            if self.world.size > 1:
                ending()
            raise KeyboardInterrupt(self.number)


@contextmanager
def holding_interrupts(world: World) -> Iterator[Interrupt]:
    """Ctrl-C goes to the `Interrupt`, while entered; nowhere but in the main thread.

    So does a SIGTERM, by which clusters announce that a job's time is over; but of several processes it is
    how the others end one, and is not held.
    """
    held = Interrupt(world)
    kinds = (signal.SIGINT, signal.SIGTERM) if world.size == 1 else (signal.SIGINT,)
    try:
        before = {kind: signal.signal(kind, held) for kind in kinds}
    except ValueError:  # Signals belong to the main thread; elsewhere there is no Ctrl-C to hold.
        yield held
        return
    try:
        yield held
    finally:
        # A Ctrl-C that reaches one of several processes after the others' must not cut its ending short.
        if world.size == 1 or not held.agreed:
            for kind, handler in before.items():
                signal.signal(kind, handler)
