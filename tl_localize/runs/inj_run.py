"""INJ in units: injections, scores, and a measurement for each method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from tl_localize.evals.inj_benchmark import TRUE_ROWS, InjBenchmark, Part, with_controls
from tl_localize.injection import Injection, JointInjection
from tl_localize.methods.base import Method, label_methods
from tl_localize.runs.base import Run, Work
from tl_localize.execution.store import Record, Unit

FRAMES = ("frame", "truth", "assignment")  # of a measurement


@dataclass(frozen=True, eq=False, repr=False)
class InjRun(Run):
    """One InjBenchmark and its methods, into one folder; arguments and errors as of ``Run``.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from tl_localize import Attribution, InjBenchmark, MemorizedSequence, load_model
    >>> from tl_localize.runs import InjRun
    >>> from tl_localize.execution.store import Store
    >>> model = load_model("reference")
    >>> sentence = MemorizedSequence.from_text(model, "The", " blue list returns")
    >>> benchmark = InjBenchmark(model=model, sequences=[sentence], ratio=0.02, learning_rate=0.02)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = InjRun(Store(Path(folder)), benchmark, [Attribution()])
    ...     (work,) = run.works
    ...     [event.label for event in run.make(work, run.missing(work))], run.missing(work)
    (['inject', 'attribution', 'random', 'row_norm'], [])
    """

    benchmark: InjBenchmark

    part: ClassVar[str] = "sentence or group"
    base_label: ClassVar[str] = "inject"
    may_grow: ClassVar[str] = "sentences, methods and ratios"
    by_ratio: ClassVar[tuple[str, ...]] = ("injection.learning_rate", "injection.max_steps")

    @property
    def labels(self) -> Mapping[str, Method]:
        return label_methods(with_controls(self.methods))

    def settings(self) -> dict[str, Any]:
        return self.benchmark.settings(self.methods)

    @staticmethod
    def ratio_of(plan: dict[str, Any]) -> float:
        return plan["injection"]["ratio"]

    @staticmethod
    def must_agree(plan: dict[str, Any]) -> dict[str, Any]:
        of_injection = {f"injection.{name}": value for name, value in plan["injection"].items() if name != "ratio"}
        return {"multiples": plan["multiples"], **of_injection}

    @staticmethod
    def works_of(plan: dict[str, Any]) -> list[Work]:
        found: list[Work] = []
        for index, part in enumerate(plan["parts"]):
            prints = [sequence for _, sequence in part["sequences"]]
            of = {"model": plan["fingerprint"], "sequences": prints, "seed": part["seed"], **plan["injection"]}
            injection = Unit("injections", of, ".safetensors")
            about = {"injection": injection.key, "part": part, "multiples": plan["multiples"]}
            methods = plan["methods"] | ({TRUE_ROWS: TRUE_ROWS} if plan["injection"]["distractors"] else {})
            measures = {label: Unit("inj", {**about, "label": label, "method": method}) for label, method in methods.items()}
            found.append(Work(index, part["name"], plan["injection"]["ratio"], injection, measures, injection.key))
        return found

    def make_base(self, work: Work) -> tuple[Injection | JointInjection, Record]:
        injection = self.benchmark.inject(self._parts[work.index])
        tensors, metadata = injection.packed()
        return injection, Record(metadata, {"state": repr(injection)}, tensors)

    def read_base(self, work: Work, record: Record) -> Injection | JointInjection:
        kind = JointInjection if self.benchmark.distractors else Injection
        return kind.unpacked(record.tensors, record.value)

    def measure(self, work: Work, base: Any, label: str) -> Record:
        part = self._parts[work.index]
        if label == TRUE_ROWS:
            results = self.benchmark.measure_truth(part, base)
        else:
            method = self.stored(label, work.base and work.base.key)
            found = self.benchmark.localize(part, base, method)
            known = [(scores, method.seconds[sequence.fingerprint]) for (scores, _), sequence in zip(found, part.sequences, strict=True)]
            results = self.benchmark.measure(part, base, label, known)
        return Record({name: getattr(results, name).to_dict("records") for name in FRAMES})

    @cached_property
    def _parts(self) -> list[Part]:
        return self.benchmark.parts()
