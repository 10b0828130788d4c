"""Runs into results folders, and what can happen to their files."""

from dataclasses import fields
from itertools import islice


class Watched:
    """This process as an executor that remembers what it computed, and stops after some tasks."""

    def __init__(self, stop_after=None, shard=(1, 1)):
        from tl_localize.execution import InProcess

        self.outcomes = []
        self.shard, self.stop_after = shard, stop_after
        self.inner = InProcess(shard=shard)

    def __call__(self, *arguments):
        for outcome in islice(self.inner(*arguments), self.stop_after):
            self.outcomes.append(outcome)
            yield outcome


def run_into(
    benchmark,
    methods,
    folder,
    stop_after=None,
    shard=(1, 1),
    **options,
):
    """What was computed, in its order."""
    from tl_localize.execution import Store

    watched = Watched(stop_after, shard)
    benchmark.run(methods, Store(folder), executor=watched, **options)
    return watched.outcomes


def records(folder, kind="*"):
    return sorted((folder / "records").glob(f"{kind}/*"))


def spoil(path, how):
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


def study_of(benchmark, ratio):
    """The study of single layers with the data of a DEL benchmark."""
    from tl_localize.evals import SingleLayerStudy

    own = {field.name: getattr(benchmark, field.name) for field in fields(benchmark)}
    return SingleLayerStudy(**own | {"ratios": (ratio,)})
