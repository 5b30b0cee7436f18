"""Makes `init_process_group("mlfabric")` work without an import: torch calls `register` when it is imported.

It costs every torch user of the environment, so it names the backend and loads nothing.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Tell torch.distributed of the backend, once."""
    import torch.distributed as dist

    if dist.is_available() and "MLFABRIC" not in dist.Backend._plugins:
        dist.Backend.register_backend("mlfabric", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from mlfabric.torch.backend import create

    return create(options, backend_options)
