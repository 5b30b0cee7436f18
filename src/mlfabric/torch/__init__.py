"""MLfabric for PyTorch: the process-group backend `mlfabric` and a communication hook for DDP.

    dist.init_process_group("mlfabric")

is all that a script changes. Where the package is installed torch finds the backend by itself; otherwise
importing this module makes it known.
"""

from mlfabric.autoload import register
from mlfabric.torch.backend import FabricProcessGroup
from mlfabric.torch.errors import CollectiveError, CollectiveTimeoutError
from mlfabric.torch.hook import managed_hook, managed_state

register()

__all__ = [
    "FabricProcessGroup",
    "managed_hook",
    "managed_state",
    "CollectiveError",
    "CollectiveTimeoutError",
]
