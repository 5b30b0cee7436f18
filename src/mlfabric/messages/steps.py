"""Steps that the scheduler calls: who takes part in the next all-reduce, and how it ended."""

from __future__ import annotations

from mlfabric.messages.words import Message


class TrainsIn(Message, frozen=True):
    """A worker that asks for no steps, nor publishes, says in which mode it trains."""

    way: str
    again: bool = False  # to a new scheduler: it was let in before


class WayRefused(Message, frozen=True):
    """To a worker: the others train in another mode."""

    reason: str


class StepReady(Message, frozen=True):
    """Where a worker stands. Steps are counted from 0; a model "of step n" is what step n begins with."""

    holds: int  # it has all sums before this step; -1: nothing, not even the first values
    applied: int  # and has applied those before this one
    base: int | None = None  # its gradient is of the model of this step; None: it has none to give
    until: int = -1  # the last step that its gradient may go into
    waits: bool = False  # it computes nothing meanwhile, and applies sums as they come
    size_bytes: int = 0  # of a gradient
    computed_s: float | None = None  # what the gradient took
    running: str | None = None  # the group of the step it was called to and is not through with
    # It rolls: it gives what it has to every step, each of one of so many parts of the model, in turn, and
    # waits for none. 0: a step is of the whole model and takes one gradient of a worker.
    parts: int = 0


class StepEnded(Message, frozen=True):
    """A worker is through with the steps it was called to; `error`: not with all of them."""

    step: int  # the first of them
    holds: int  # it has all sums before this step now
    error: str | None = None
    more: bool = False  # it rolls, and has gradients for the next steps already


class StepsOver(Message, frozen=True):
    """A worker takes no part in steps any more."""


class StepCalled(Message, frozen=True):
    """To all in `nodes`: sum the contributors' gradients now. Step -1 hands one's values to all."""

    step: int
    group: str  # its name
    nodes: tuple[str, ...]  # in rank order
    contributors: tuple[str, ...]  # the others add nothing
    joiners: tuple[str, ...] = ()  # get model and optimizer state of this step too,
    feeders: tuple[str, ...] = ()  # from these contributors, a slice from each
    count: int = 1  # so many steps follow each other without another call


class StepBroken(Message, frozen=True):
    """To whoever is still at a step: it failed elsewhere, it will not end here."""

    group: str
    reason: str


class StepsWithout(Message, frozen=True):
    """To a worker that is left out for its link: keep an eye on it, together with these."""

    peers: tuple[str, ...]
