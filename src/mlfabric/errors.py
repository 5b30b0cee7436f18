"""What went wrong, said once, in one sentence that names the thing and what to do.

Every error a user can cause is a FabricError; the command line prints its sentence and exits with 2.
"""


class FabricError(Exception):
    """Something a user can put right; the message is one sentence."""


class ScenarioError(FabricError):
    """A scenario file that can't be used: file, line and key are in the message."""


class ConnectError(FabricError):
    """A host could not be reached, or what answered there is not a fabric of ours."""


class ShapeMismatch(FabricError):  # noqa: N818 - a fact about two models, not a fault of the program
    """Two members of a job disagree about the model or an array."""
