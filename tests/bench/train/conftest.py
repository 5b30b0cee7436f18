"""Some tests of this folder make labs; where the machine forbids it, they say why."""

from __future__ import annotations

from mlfabric.lab.testing import lab_is_possible, make_lab

__all__ = ["lab_is_possible", "make_lab"]
