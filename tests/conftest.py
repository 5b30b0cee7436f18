"""Properties are tried on the same examples every time; a failure prints how to repeat it."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, print_blob=True)
settings.load_profile("repeatable")
