"""MLfabric for PyTorch: the process-group backend `mlfabric`, a hook for DDP, and training without a barrier.

    dist.init_process_group("mlfabric")

is all that a synchronous script changes; `join(model, optimizer)` trains asynchronously. Where the package is
installed torch finds the backend by itself; otherwise importing this module makes it known.
"""

from mlfabric.autoload import register
from mlfabric.torch.arithmetic import register_types
from mlfabric.torch.backend import FabricProcessGroup, Options
from mlfabric.torch.errors import CollectiveError, CollectiveTimeoutError
from mlfabric.torch.hook import managed_hook, managed_state
from mlfabric.torch.training import Training, join

register()
register_types()

__all__ = [
    "join",
    "Training",
    "FabricProcessGroup",
    "Options",
    "managed_hook",
    "managed_state",
    "CollectiveError",
    "CollectiveTimeoutError",
]
