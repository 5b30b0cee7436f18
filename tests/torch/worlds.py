"""Worlds of ranks for tests: one process imports torch once and forks the ranks of every world from itself.

Run as a program it reads one request a line and answers with one line; `Worlds` is the other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Worlds:
    """Runs scenarios, each in a world of its own."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torch.worlds"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )

    def run(self, scenario: str, size: int, *, timeout: float = 100.0, **options: Any) -> list[Any]:
        """What each rank returned; an error of a rank is text that begins with "raised "."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"scenario": scenario, "size": size, "timeout": timeout, "options": options}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: list[Any] = json.loads(self._process.stdout.readline())
        return answer

    def check(self, scenario: str, size: int, **options: Any) -> list[Any]:
        """The same, where no rank may fail."""
        answers = self.run(scenario, size, **options)
        wrong = [f"rank {rank} {said}" for rank, said in enumerate(answers) if failed(said)]
        assert not wrong, "\n".join(wrong[:3])
        return answers

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def torchrun(folder: Path, ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would whose package is installed: torch finds the backend by its entry point."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch.backends"]
    info = folder / "mlfabric_of_test-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlfabric-of-test\nVersion: 0.0\n")
    lines = "".join(f"{name} = {where}\n" for name, where in points.items())
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{lines}")
    paths = os.pathsep.join([str(folder), str(ROOT / "src")])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, *command],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def failed(answer: Any) -> bool:
    return isinstance(answer, str) and answer.startswith("raised ")


def _rank(scenario: Any, rank: int, size: int, folder: str, options: dict[str, Any], out: int) -> None:
    try:
        answer = scenario(rank, size, folder, **options)
    except BaseException as error:
        answer = f"raised {type(error).__name__}: {error}\n{traceback.format_exc(limit=-2)}"
    with os.fdopen(out, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(answer))
    sys.stderr.flush()
    os._exit(0)


def _world(scenario: Any, size: int, timeout: float, options: dict[str, Any]) -> list[Any]:
    ranks = []
    with tempfile.TemporaryDirectory(prefix="mlfabric-world-") as folder:
        for rank in range(size):
            read, write = os.pipe()
            process = os.fork()
            if not process:
                os.close(read)
                _rank(scenario, rank, size, folder, options, write)
            os.close(write)
            ranks.append((process, read))
        until = time.monotonic() + timeout
        answers = [_answer(read, until) for _, read in ranks]
        for process, read in ranks:
            os.close(read)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return answers


def _answer(read: int, until: float) -> Any:
    written = b""
    while True:
        left = until - time.monotonic()
        if left <= 0 or not select.select([read], [], [], left)[0]:
            return f"raised Hang: no answer in time, {written!r}"
        more = os.read(read, 65536)
        if not more:
            return json.loads(written) if written else "raised Crash: the process ended without a word"
        written += more


def main() -> None:
    # What DDP loads when it is first used, every rank would have to load again.
    import torch._dynamo
    import torch.utils._sympy.functions  # noqa: F401

    from tests.torch import scenarios

    for line in sys.stdin:
        request = json.loads(line)
        scenario = getattr(scenarios, request["scenario"])
        answers = _world(scenario, request["size"], request["timeout"], request["options"])
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
