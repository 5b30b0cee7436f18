"""What a collective call raises: errors of ours that scripts written for Gloo catch too."""

from __future__ import annotations

from mlfabric.errors import FabricError


class CollectiveError(FabricError, RuntimeError):
    """A collective or a message failed; the sentence says which, and because of which rank."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A wait took longer than its limit; the sentence says whom it waited for."""
