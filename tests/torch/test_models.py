"""The networks that benchmarks train are the ones they are called."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")

from benchmarks.models import RESNET18_PARAMETERS, RESNET50_PARAMETERS, resnet18, resnet50  # noqa: E402


@pytest.mark.parametrize(
    ("make", "parameters", "tensors"),
    [(resnet18, RESNET18_PARAMETERS, 62), (resnet50, RESNET50_PARAMETERS, 161)],
)
def test_network_has_exactly_the_parameters_of_its_name(
    make: Callable[[], Any], parameters: int, tensors: int
) -> None:
    with torch.device("meta"):
        model = make()
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(list(model.parameters())) == tensors
