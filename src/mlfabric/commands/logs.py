"""How long-running commands tell what happens: a line of text, or a JSON object per line."""

from __future__ import annotations

import logging

import msgspec

from mlfabric.errors import FabricError


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = {
            "at_s": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(said).decode()


def log_to_terminal(form: str) -> None:
    """Log to standard error in this form."""
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(_JsonLines())
    elif form == "text":
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    else:
        raise FabricError(f"--log-format is text or json, not {form!r}")
    logging.basicConfig(level=logging.INFO, handlers=[handler])
