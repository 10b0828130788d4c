"""Runs into results folders, and what can happen to their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Watched:
    """This process as an executor that remembers what it computed, and stops after some tasks."""

    def __init__(self, stop_after: int | None = None, shard: tuple[int, int] = (1, 1)) -> None:
        from tl_localize.execution import InProcess

        self.outcomes: list[Any] = []
        self.shard = shard
        self.inner = InProcess(shard, stop=lambda: len(self.outcomes) == stop_after)

    def __call__(self, *arguments: Any) -> Iterator[Any]:
        for outcome in self.inner(*arguments):
            self.outcomes.append(outcome)
            yield outcome


def run_into(
    benchmark: Any,
    methods: list[Any],
    folder: Path,
    stop_after: int | None = None,
    shard: Any = (1, 1),
    **options: Any,
) -> Any:
    """What was computed, in its order."""
    from tl_localize.execution import Store

    watched = Watched(stop_after, shard)
    benchmark.run(methods, Store(folder), executor=watched, **options)
    return watched.outcomes


def records(folder: Path, kind: str = "*") -> list[Path]:
    return sorted((folder / "records").glob(f"{kind}/*"))


def spoil(path: Path, how: str) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 4
    nested = b'{"plan": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    spoilt = {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "flipped": data,
        "foreign": b'{"a": 1}\n',
        "nested": nested,
    }
    path.write_bytes(spoilt[how])
