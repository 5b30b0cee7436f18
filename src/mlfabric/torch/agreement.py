"""What all workers of a job have to agree in. The first one's settings count; one with others is refused."""

from __future__ import annotations

from typing import Any

import msgspec

from mlfabric.messages import JobSettings, RuleSpec
from mlfabric.rules import make_rule
from mlfabric.torch.modes import TAKES, Wishes
from mlfabric.ways import different_mode


def difference(wishes: Wishes, rule: RuleSpec, settings: JobSettings, published: RuleSpec) -> str:
    """A sentence about the first thing in which a worker's wishes and rule are not the job's, or nothing.

    Numbers of the optimizer may differ, as schedules change them; they travel with the updates.
    """
    mode = different_mode(wishes.mode, settings.way)
    if mode:
        return mode
    ours, theirs = _kinds(rule), _kinds(published)
    if ours != theirs:
        return f"the job's servers step by {theirs}, this worker asks for {ours}; give all the same optimizer"
    if _vectors(rule) != _vectors(published):
        return (
            f"this worker's {ours} needs other state than the job's, {_vectors(rule)} numbers for each "
            f"parameter instead of {_vectors(published)}; give all the same momentum, or none"
        )
    for name, (wanted, held) in _compared(wishes, settings).items():
        if name in TAKES[wishes.mode] and wanted != held:
            return f"the job trains with {name}={held!r}, this worker asks for {wanted!r}; give all the same"
    return ""


def _compared(wishes: Wishes, settings: JobSettings) -> dict[str, tuple[Any, Any]]:
    bound = "none" if settings.unbounded else "auto" if settings.max_delay is None else settings.max_delay
    pairs: dict[str, tuple[Any, Any]] = {
        "max_delay": (wishes.max_delay, bound),
        "staleness": (wishes.staleness, settings.staleness),
        "divergence": (wishes.divergence, settings.divergence),
        "codec": (wishes.codec, settings.codec),
    }
    # Left to us, these follow from how many workers there were at the beginning.
    if wishes.wait_for is not None:
        pairs["wait_for"] = (wishes.wait_for, settings.wait_for)
    if wishes.shards is not None:
        pairs["shards"] = (wishes.shards, settings.shards or None)
    return pairs


def _kinds(spec: RuleSpec) -> str:
    names = {piece.name for piece in spec.pieces} or {spec.name}
    return " and ".join(sorted(names - {"Average"}))


def _vectors(spec: RuleSpec) -> int:
    return make_rule(msgspec.structs.replace(spec, every=1)).vectors
