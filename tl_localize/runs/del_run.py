"""DEL in units: the model as it is, scores, and for each target, method and ratio what silencing does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import pandas as pd

from tl_localize.evals.del_benchmark import Before, DelBenchmark, Evaluation, Share, check_by_layer
from tl_localize.methods.base import Method, check_scores, label_methods
from tl_localize.runs.base import Run, Work
from tl_localize.execution.store import Record, Unit

BY_LAYER = ", layer by layer"  # in the labels of single layers


@dataclass(frozen=True, eq=False, repr=False)
class DelRun(Run):
    """One DelBenchmark at one ratio, and its methods, into one folder; other arguments and errors as of ``Run``.

    Args:
        multiples: of the budget that single layers get, as of ``DelBenchmark.run_single_layer``, which is then what is run.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize import Attribution, DelBenchmark, load_model
    >>> from tl_localize.reference import held_out_tokens, reference_sequences
    >>> from tl_localize.runs import DelRun
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> two, text = reference_sequences(model)[:2], held_out_tokens()[:1]
    >>> benchmark = DelBenchmark(model, two, text, ratios=(0.05,), n_dev=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = DelRun(Store(Path(folder)), benchmark, [Attribution()])
    ...     [event.label for event in run.make(run.works[0], ["attribution"])], [len(run.missing(work)) for work in run.works]
    (['before', 'attribution'], [1, 2])
    """

    benchmark: DelBenchmark
    multiples: tuple[int, ...] = ()

    part: ClassVar[str] = "target"
    base_label: ClassVar[str] = "before"
    may_grow: ClassVar[str] = "targets, methods and ratios"

    def __post_init__(self) -> None:
        if len(self.benchmark.ratios) != 1:
            raise ValueError(f"ratios must be a single one in each run, got {self.benchmark.ratios}. Make a run for each of them.")
        for method in self.methods if self.multiples else ():
            check_by_layer(method)
        super().__post_init__()

    @property
    def labels(self) -> Mapping[str, Method]:
        if self.multiples:
            return {label + BY_LAYER: method for label, method in label_methods(self.methods).items()}
        return label_methods(self.benchmark.with_random(self.methods))

    def settings(self) -> dict[str, Any]:
        settings = self.benchmark.settings(self.methods)
        shares = [asdict(share) for share in self.shares]
        return {**settings, "shares": shares, "methods": {label: repr(method) for label, method in self.labels.items()}}

    @cached_property
    def shares(self) -> list[Share]:
        """What is silenced for one target, one after the other."""
        return self.benchmark.shares(self.benchmark.ratios[0], self.multiples)

    @staticmethod
    def ratio_of(plan: dict[str, Any]) -> float:
        return plan["ratios"][0]

    @staticmethod
    def must_agree(plan: dict[str, Any]) -> dict[str, Any]:
        return {name: plan[name] for name in ("n_sequences", "sequences", "general_text", "intervention", "first_layer", "seed")}

    @staticmethod
    def works_of(plan: dict[str, Any]) -> list[Work]:
        before = Unit("before", {"model": plan["fingerprint"], **{name: plan[name] for name in ("sequences", "general_text")}})
        ratio = DelRun.ratio_of(plan)
        found: list[Work] = []
        for index, (name, sequence) in enumerate(plan["parts"]):
            about = {"before": before.key, "target": index, "sequence": sequence, "ratio": ratio, "shares": plan["shares"]}
            about |= {name: plan[name] for name in ("intervention", "first_layer", "seed")}
            measures = {label: Unit("del", {**about, "method": method}) for label, method in plan["methods"].items()}
            found.append(Work(index, name, ratio, before, measures, f"target {index}"))
        return found

    def make_base(self, work: Work) -> tuple[Evaluation, Record]:
        evaluation = Evaluation(self.benchmark)
        before = evaluation.before
        return evaluation, Record({"frame": before.frame.to_dict("records"), "predicted": before.predicted})

    def read_base(self, work: Work, record: Record) -> Evaluation:
        return Evaluation(self.benchmark, Before(pd.DataFrame(record.value["frame"]), record.value["predicted"]))

    def measure(self, work: Work, base: Evaluation, label: str) -> Record:
        method = self.stored(label)
        scores = check_scores(method(self.benchmark.model, base.sequences[work.index]), self.benchmark.model, method)
        sets = [self.benchmark.chosen(scores, self.benchmark.ratios[0], share) for share in self.shares]
        return Record({"effects": [base.effect(work.index, chosen).packed() for chosen in sets]})
