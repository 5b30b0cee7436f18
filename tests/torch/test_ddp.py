"""DDP on the backend, unchanged: the same parameters on all ranks, and the losses that Gloo gives."""

from __future__ import annotations

import pytest

from tests.torch.worlds import Worlds

pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")

FORMS = ("plain", "static", "unused", "views", "no_sync", "join", "mixed")


@pytest.mark.parametrize(
    ("size", "forms"),
    [
        (3, FORMS),
        pytest.param(5, FORMS, marks=[pytest.mark.full, pytest.mark.timeout(600)]),
        pytest.param(8, ("plain", "views"), marks=[pytest.mark.full, pytest.mark.timeout(600)]),
    ],
)
def test_ddp_trains_as_on_gloo(worlds: Worlds, size: int, forms: tuple[str, ...]) -> None:
    answers = worlds.check("train_forms", size, timeout=500.0, forms=forms)
    for form in forms:
        assert len({answer[form][0]["digest"] for answer in answers}) == 1, form
        rounding = 2e-2 if form == "mixed" else 1e-4
        for answer in answers:
            ours, gloo = answer[form]
            assert ours["losses"] == pytest.approx(gloo["losses"], rel=rounding, abs=rounding), form


def test_the_hook_serves_a_job_on_another_backend(worlds: Worlds) -> None:
    answers = worlds.check("train_by_hook", 2)
    for state in (0, 1):  # a group made for it, and a fabric of the script's own
        assert len({answer[state]["digest"] for answer in answers}) == 1
        for answer in answers:
            assert answer[state]["losses"] == pytest.approx(answer[2]["losses"], rel=1e-4)


def test_what_torch_builds_on_collectives_works(worlds: Worlds) -> None:
    size = 2
    for answer in worlds.check("built_upon", size):
        assert answer["zero"]
        assert answer["functional"] == [[2.0, 2.0], [0.0, 1.0], [2.0]]
        assert answer["threads"] == [0.0, 1.0, 2.0]
        assert answer["many"]
