"""Small runs into folders: INJ of four sentences, DEL of three targets, REV of four sentences."""

from dataclasses import replace
from shutil import copytree, move

import pytest
import torch
from folders import run_into, study_of


@pytest.fixture(autouse=True)
def whole_runs(unchecked):
    """They are all of whole runs."""


@pytest.fixture
def methods():
    from tl_localize import Activations, HardConcrete

    return [Activations(), HardConcrete(steps=3)]


@pytest.fixture
def inj(gpt2_like, make_inj):
    return make_inj(gpt2_like)


@pytest.fixture
def deletion(gpt2_like, make_sequences):
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
def run_inj(inj, methods, tmp_path):
    """INJ into a folder, with everything as in the other runs unless it is given."""

    def run(
        name="run",
        methods=methods,
        stop_after=None,
        shard=(1, 1),
        **changes,
    ):
        options = {key: changes.pop(key) for key in ("progress", "retry_failed") if key in changes}
        return run_into(
            replace(inj, **changes), methods, tmp_path / name, stop_after, shard, **options
        )

    return run


@pytest.fixture
def rev(rev):
    return replace(rev, n_sequences=2, ratios=(0.5,))


@pytest.fixture
def run_rev(rev, methods, tmp_path):
    """REV into a folder."""

    def run(name="run", stop_after=None, shard=(1, 1)):
        return run_into(rev, methods, tmp_path / name, stop_after, shard)

    return run


@pytest.fixture
def run_del(deletion, methods, tmp_path):
    """DEL at two ratios, and layer by layer, into a folder."""
    from tl_localize import Activations

    def run(
        name="run",
        methods=methods,
        stop_after=None,
        shard=(1, 1),
        **changes,
    ):
        one = replace(deletion, **changes)
        single = study_of(one, one.ratios[0])
        outcomes = run_into(one, methods, tmp_path / name, stop_after, shard)
        left = None if stop_after is None else stop_after - len(outcomes)
        return (
            outcomes
            if left == 0
            else outcomes + run_into(single, [Activations()], tmp_path / name, left, shard)
        )

    return run


@pytest.fixture(scope="session")
def finished_runs():
    """The folders with undisturbed runs that ``finished`` has made, and their numbers of tasks, by
    what was run.
    """
    return {}


@pytest.fixture
def finished(finished_runs, tmp_path_factory, run_inj, run_del, run_rev, tmp_path):
    """Put an undisturbed run of "inj", "del" or "rev" into a folder, made once a session and then
    copied; gives the number of its tasks.
    """

    def copy(which, name="run", **changes):
        key = f"{which} {changes!r}"
        if key not in finished_runs:
            run = {"inj": run_inj, "del": run_del, "rev": run_rev}[which]
            n_tasks = len(run("undisturbed", **changes))
            finished_runs[key] = (
                move(tmp_path / "undisturbed", tmp_path_factory.mktemp("finished") / "run"),
                n_tasks,
            )
        folder, n_tasks = finished_runs[key]
        copytree(folder, tmp_path / name)
        return n_tasks

    return copy


@pytest.fixture
def inj_numbers(tmp_path):
    """All that INJ measured, but for the time that it took."""
    from tl_localize.evals import InjResults
    from tl_localize.execution import Store

    def numbers(name="run"):
        results = InjResults.of(Store(tmp_path / name))
        assert not len(results.missing)
        frame = results.frame.drop(columns="seconds")
        return (
            frame.to_csv(),
            results.table().to_csv(),
        )

    return numbers


@pytest.fixture
def del_numbers(tmp_path):
    """All that DEL measured."""
    from tl_localize.evals import DelResults
    from tl_localize.evals.deletion.benchmark import single_layers
    from tl_localize.execution import Store

    def numbers(name="run"):
        results = DelResults.of(Store(tmp_path / name))
        assert not len(results.missing)
        matrices = [matrix.to_csv() for matrix in results.confusion.values()]
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
def rev_numbers(tmp_path):
    """All that REV measured."""
    from tl_localize.evals import RevResults
    from tl_localize.execution import Store

    def numbers(name="run"):
        results = RevResults.of(Store(tmp_path / name))
        assert not len(results.missing)
        return results.frame.to_csv(), results.table().to_csv()

    return numbers


@pytest.fixture
def leftovers(tmp_path):
    """Files in a folder that an undisturbed run does not leave."""
    return lambda name="run": [
        path
        for part in ("tmp", "set_aside", "failures")
        for path in (tmp_path / name / part).iterdir()
    ]
