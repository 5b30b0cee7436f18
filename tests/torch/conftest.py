from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torch.worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")
    held = Worlds()
    yield held
    held.close()
