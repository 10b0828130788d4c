"""Small runs into folders: INJ of four sentences, DEL of three targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree, move
from typing import Any

import pytest
import torch
from folders import run_into

Run = Callable[..., list[Any]]


@pytest.fixture
def methods() -> list[Any]:
    from tl_localize import Activations, HardConcrete

    return [Activations(), HardConcrete(steps=3)]


@pytest.fixture
def inj(gpt2_like: Any, make_sequences: Any) -> Any:
    from tl_localize.evals import InjBenchmark

    sentences = make_sequences(*[(8 + i, 3) for i in range(4)], d_vocab=50)
    return InjBenchmark(
        model=gpt2_like,
        sequences=sentences,
        ratio=0.2,
        learning_rate=0.05,
        stop_loss=0.5,
        max_steps=3,
    )


@pytest.fixture
def deletion(gpt2_like: Any, make_sequences: Any) -> Any:
    from tl_localize.evals import DelBenchmark

    general = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(1))
    sequences = make_sequences((9, 3), (9, 3), (12, 3), (7, 2), (9, 1))
    return DelBenchmark(
        gpt2_like,
        sequences,
        general,
        ratios=(0.1, 0.2),
        n_dev=1,
        n_targets=3,
        decode=str,
        first_layer=0,
    )


@pytest.fixture
def run_inj(inj: Any, methods: list[Any], tmp_path: Path) -> Run:
    """INJ into a folder, with everything as in the other runs unless it is given."""

    def run(
        name: str = "run",
        methods: list[Any] = methods,
        stop_after: int | None = None,
        shard: Any = (1, 1),
        **changes: Any,
    ) -> Any:
        options = {key: changes.pop(key) for key in ("progress", "retry_failed") if key in changes}
        return run_into(
            replace(inj, **changes), methods, tmp_path / name, stop_after, shard, **options
        )

    return run


@pytest.fixture
def run_del(deletion: Any, methods: list[Any], tmp_path: Path) -> Run:
    """DEL at two ratios, and layer by layer, into a folder."""
    from tl_localize import Activations
    from tl_localize.evals.presets import single_layer_run

    def run(
        name: str = "run",
        methods: list[Any] = methods,
        stop_after: int | None = None,
        shard: Any = (1, 1),
        **changes: Any,
    ) -> Any:
        one = replace(deletion, **changes)
        single, _ = single_layer_run(replace(one, ratios=one.ratios[:1]), Activations())
        outcomes = run_into(one, methods, tmp_path / name, stop_after, shard)
        left = None if stop_after is None else stop_after - len(outcomes)
        return (
            outcomes
            if left == 0
            else outcomes + run_into(single, [Activations()], tmp_path / name, left, shard)
        )

    return run


@pytest.fixture(scope="session")
def finished_runs() -> dict[str, tuple[Path, int]]:
    """The folders with undisturbed runs that ``finished`` has made, and their numbers of tasks, by
    what was run.
    """
    return {}


@pytest.fixture
def finished(
    finished_runs: Any, tmp_path_factory: Any, run_inj: Run, run_del: Run, tmp_path: Path
) -> Callable[..., int]:
    """Put an undisturbed run of "inj" or "del" into a folder, made once a session and then copied;
    gives the number of its tasks.
    """

    def copy(which: str, name: str = "run", **changes: Any) -> int:
        key = f"{which} {changes!r}"
        if key not in finished_runs:
            n_tasks = len({"inj": run_inj, "del": run_del}[which]("undisturbed", **changes))
            finished_runs[key] = (
                move(tmp_path / "undisturbed", tmp_path_factory.mktemp("finished") / "run"),
                n_tasks,
            )
        folder, n_tasks = finished_runs[key]
        copytree(folder, tmp_path / name)
        return n_tasks

    return copy


@pytest.fixture
def inj_numbers(tmp_path: Path) -> Callable[..., Any]:
    """All that INJ measured, but for the time that it took."""
    from tl_localize.evals import InjResults
    from tl_localize.execution import Store

    def numbers(name: str = "run") -> tuple[str, ...]:
        results = InjResults.of(Store(tmp_path / name))
        assert not len(results.missing)
        frame = results.frame.drop(columns="seconds")
        return (
            frame.to_csv(),
            results.table().to_csv(),
            results.truth.to_csv(),
            results.assignment.to_csv(),
        )

    return numbers


@pytest.fixture
def del_numbers(tmp_path: Path) -> Callable[..., Any]:
    """All that DEL measured."""
    from tl_localize.evals import DelResults
    from tl_localize.evals.single_layer import single_layers
    from tl_localize.execution import Store

    def numbers(name: str = "run") -> list[str]:
        results = DelResults.of(Store(tmp_path / name))
        assert not len(results.missing)
        matrices = [
            matrix.to_csv()
            for found in (results.confusion, results.confusion_levenshtein)
            for matrix in found.values()
        ]
        layers = single_layers(Store(tmp_path / name))
        assert set(layers["method"]) == {"activations"}
        return [
            results.frame.to_csv(),
            results.before.to_csv(),
            results.table().to_csv(),
            *matrices,
            layers.to_csv(),
        ]

    return numbers


@pytest.fixture
def leftovers(tmp_path: Path) -> Callable[..., list[Path]]:
    """Files in a folder that an undisturbed run does not leave."""
    return lambda name="run": [
        path
        for part in ("tmp", "set_aside", "failures")
        for path in (tmp_path / name / part).iterdir()
    ]
