"""A real model, its plan and the paper's data: what the parts of this folder measure with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from frames import write_frame
from page import write_page
from paper_texts import EXPANDED, general_text, memorized, sentences
from plan import Grid, Plan

from tl_localize.execution import Store
from tl_localize.execution.store import Cell
from tl_localize.texts.reference import N_DEV

CELL = ("method", "part", "scope")  # in the order of a Cell
Tuned = dict[str, dict[str, Any]]


class SharedScores(Store):
    """A results folder whose scores lie in another one, beside those of other folders: they do not
    depend on what is ablated.
    """

    def __init__(self, folder: Path, scores: Store) -> None:
        super().__init__(folder)
        self.scores = scores

    def get_many(
        self,
        inputs: Sequence[dict[str, Any]],
        compute: Callable[[list[int]], Iterable[Any]],
    ) -> list[Any]:
        if inputs and inputs[0]["step"] == "scores":
            return self.scores.get_many(inputs, compute)
        return super().get_many(inputs, compute)


def with_grids(methods: Sequence[Any], grids: Mapping[str, Grid], **settings: Any) -> list[Any]:
    """Some methods and those of all points of the grids, each once: a default may be a point."""
    from tl_localize.evals.tuning import expand

    fixed = {name: (value,) for name, value in settings.items()}
    tried = [method for name, grid in grids.items() for method in expand(name, grid | fixed)]
    return [*methods, *(method for method in tried if method not in methods)]


def renamed(method: Any, name: str) -> Any:
    """A method under another name, under which it stands beside itself in a table."""
    return type(name, (type(method),), {"name": name})(**vars(method))


@dataclass(frozen=True, eq=False)
class RealModel:
    """What is measured on one model.

    Args:
        name: of the model, or its file.
        data: the folder of the paper's data.
        folder: that the results go to.
        shard: (i, n), the i-th of n parts.
    """

    name: str
    model: Any
    plan: Plan
    data: Path
    folder: Path
    shard: tuple[int, int] = (1, 1)

    @property
    def title(self) -> str:
        return Path(self.name).name.removesuffix(".gguf")

    def store(self, part: str) -> Store:
        """The results folder of a part of INJ or REV."""
        return Store(self.folder / "runs" / part)

    def del_store(self, part: str) -> Store:
        """The results folder of a part of DEL; all have their scores in one."""
        return SharedScores(self.folder / "runs" / part, self.store("scores"))

    def run(self, benchmark: Any, methods: Sequence[Any], store: Store) -> Any:
        """A benchmark's results, which lack nothing that was asked for here, unless others compute
        a part; an earlier run may have asked for more texts.
        """
        results = benchmark.run(methods, store, shard=self.shard)
        if self.shard[1] == 1:
            asked = benchmark.settings(benchmark.label(methods)).cells()
            cells = [Cell(*cell) for cell in results.missing[[*CELL]].to_numpy()]
            missing = results.missing[[cell in asked for cell in cells]]
            failures = "\n".join(f"{cell}: {why}" for cell, why in store.failures().items())
            assert not len(missing), f"{missing.to_string()}\n{failures}"
        return results

    def publish(self, **frames: pd.DataFrame) -> None:
        """Write frames, of which the page is made."""
        for name, frame in frames.items():
            write_frame(self.folder / "frames", name, frame)

    def write_page(self) -> None:
        """Write the page of all frames that are there; its figures come with test_page."""
        write_page(self.folder / "frames", self.folder, self.title, draw=False)

    # Texts

    def _short(self, some: Sequence[Any]) -> list[Any]:
        n = self.plan.n_tokens
        return [
            replace(sequence, tokens=sequence.tokens[:n]) if n else sequence for sequence in some
        ]

    def sentences(self, n: int | None, expanded: bool = False) -> list[Any]:
        """The first sentences of ECBD-2021 after the dev ones, or of 2022 and 2023."""
        if expanded:
            return self._expanded[len(self._first) :][:n]
        return self._first[N_DEV:][:n]

    @property
    def dev_sentences(self) -> list[Any]:
        return self._first[:N_DEV]

    @cached_property
    def _first(self) -> list[Any]:
        return self._short(sentences(self.model, self.data))

    @cached_property
    def _expanded(self) -> list[Any]:
        return self._short(sentences(self.model, self.data, EXPANDED))

    @cached_property
    def candidates(self) -> list[Any]:
        """The texts that the model may have memorized."""
        found = memorized(self.model, self.name, self.data)
        return self._short(
            [replace(sequence, n_prefix=self._n_prefix(sequence)) for sequence in found]
        )

    def _n_prefix(self, sequence: Any) -> int:
        return min(sequence.n_prefix, (self.plan.n_tokens or len(sequence)) - 2)

    @cached_property
    def accuracies(self) -> list[float]:
        """Of the candidates, in float64 and rounded, so that 7 right tokens of 10 are 0.7."""
        from tl_localize.metrics import accuracy

        return accuracy(self.model, self.candidates).double().round(decimals=6).tolist()

    @cached_property
    def texts(self) -> list[Any]:
        """The recited texts in random order, the dev ones first; the paper's own sets as they
        are.
        """
        from tl_localize.evals.settings import drawn_first

        least = self.plan.min_accuracy
        if least is None:
            return self.candidates
        pairs = zip(self.candidates, self.accuracies, strict=True)
        return drawn_first([sequence for sequence, share in pairs if share >= least], 0)

    def general(self, n_rows: int | None = None) -> Any:
        """[row pos] random text of the Pile."""
        rows, length = self.plan.general
        return general_text(self.model, self.name, self.data, n_rows or rows, length)

    # Methods

    @property
    def zero_out(self) -> Tuned:
        return {"zero_out": {"screen": self.plan.screen}} if self.plan.screen else {}

    def _of(self, names: str) -> list[str]:
        """The settings of the plan that are of these methods."""
        wanted = names.split(",")
        return [setting for setting in self.plan.settings if setting.split(".")[0] in wanted]

    def del_methods(self, names: str) -> list[Any]:
        from tl_localize.evals.settings import del_methods

        return del_methods(names, self._of(names), self.name, self.zero_out)

    def inj_runs(self, texts: Sequence[Any], names: str, ratio: float, **options: Any) -> Any:
        """INJ at a ratio, and its methods."""
        from tl_localize.evals.settings import inj_runs

        how = {**self.plan.training, **options}
        settings = self._of(names)
        ((benchmark, methods),) = inj_runs(
            self.model, self.name, texts, names, settings, self.zero_out, [ratio], **how
        )
        return benchmark, methods

    def searched(self, benchmark: str) -> list[Any]:
        """The masks that were searched on dev texts and have a setting with a score; none while
        they are not searched.
        """
        from tl_localize.evals.settings import make_method
        from tl_localize.evals.tuning import read_settings

        path = self.settings_file(benchmark)
        if not path.is_file():
            return []
        found = read_settings(path)
        return [renamed(make_method(name, found[name]), f"{name}_tuned") for name in found]

    def settings_file(self, benchmark: str) -> Path:
        return self.folder / f"settings-{benchmark}.json"
