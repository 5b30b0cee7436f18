"""16-bit numbers are combined to the same bits with and without torch."""

from __future__ import annotations

import numpy as np
import pytest

from mlfabric.collective import arithmetic

torch = pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("combine", ["sum", "avg", "product", "min", "max"])
def test_numpy_and_torch_agree_on_every_bit(
    dtype: str, combine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlfabric.torch  # noqa: F401 - registers torch's own

    by_torch = arithmetic.combine_for(combine, dtype, 3)
    monkeypatch.setattr(arithmetic, "_registered", {})
    by_numpy = arithmetic.combine_for(combine, dtype, 3)
    kind = getattr(torch, dtype)
    random = torch.Generator().manual_seed(7)
    # Numbers of all magnitudes: sums that round, cancel, overflow and vanish.
    drawn = [
        torch.randn(40_000, generator=random) * 10 ** (torch.rand(40_000, generator=random) * 12 - 7)
        for _ in range(3)
    ]
    results = []
    for function in (by_torch, by_numpy):
        parts = [each.to(kind).clone() for each in drawn]
        views = [part.view(torch.uint8).numpy().data for part in parts]
        function(views, 0, views[0], True)
        # Which of two zeros is the least is nobody's matter.
        results.append((parts[0] + 0).view(torch.int16).numpy())
    np.testing.assert_array_equal(*results)
