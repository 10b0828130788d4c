"""INJ: write sentences into a few rows of W_out, then ask a method which rows they are.

Two forms. The paper's: one sentence at a time. It has a shortcut, because training makes rows longer: RowNorm, a ruler, shows how much of
it a method may owe to that. Ours, with distractors: several sentences in disjoint rows of one model, each set of rows silent on the
others' sentences. All the rows are altered alike, so a method has to read the sentence to tell whose rows are whose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from tl_localize.execution.store import environment, prepare_folder, write_json, write_text
from tl_localize.injection import Injection, JointInjection, draw_sets, inject, inject_together
from tl_localize.methods import RandomBaseline, RowNorm
from tl_localize.methods.base import Method, Progress, Report, check_methods, check_scores, label_methods
from tl_localize.metrics import accuracy
from tl_localize.neurons import LanguageModel, NeuronView, Real, model_name
from tl_localize.scores import NeuronScores, NeuronSet
from tl_localize.sequences import MemorizedSequence, check_sequences
from tl_localize.stats import compare_with_reference, paired_test, styled, with_error

Rows = list[dict[str, Any]]

# Learning rate and steps of an injection by ratio: the paper's up to 2 %; beyond, so many rows learn with smaller steps, of which
# each row takes part (at 0.01 rows grow that the sentence does not need, and no method that reads the sentence can find them).
INJECTION = ((0.002, 0.05, 200), (0.02, 0.01, 200), (1.0, 0.003, 400))
TOGETHER = (0.003, 600)  # with distractors
TRUE_ROWS = "true_rows"  # the label of the best that a method could do


@dataclass(frozen=True, eq=False)
class Part:
    """What is written into the model together: one sentence, or a group of them.

    Args:
        seed: of the rows that are trained.
    """

    index: int
    name: str
    seed: int
    sequences: Sequence[MemorizedSequence]

    def settings(self) -> dict[str, Any]:
        """Everything that its numbers depend on."""
        return {"name": self.name, "seed": self.seed, "sequences": [[s.id, s.fingerprint] for s in self.sequences]}


@dataclass(frozen=True, kw_only=True, eq=False)
class InjBenchmark:
    """Recall of the rows into which sentences were injected.

    Without distractors sentence i is written alone, into rows drawn with seed ``seed + i``, as in the paper's algorithm 1. With
    K - 1 distractors the sentences come in groups of K, group g is written together with seed ``seed + g``; sentences that are left
    over, because no group can take them, are not measured.

    Source: Chang et al. (2024), arXiv:2311.09060, section 4.1. Differs: RowNorm and the form with distractors are ours.
    Args:    sequences: the sentences; each is injected and localized whole, with its first token as the prefix.
             ratio: share of all rows that one sentence is written into.
             learning_rate: of the injection; by default the paper's, 0.05 at ratios up to 0.2 %, 0.01 up to 2 %, and 0.003 beyond and
                 with distractors.
             max_steps: of the injection; by default the paper's 200, 400 at ratios above 2 %, 600 with distractors.
             multiples: recall is measured among the top ``ratio * multiple`` of each layer, and of the model.
             distractors: other sentences in the model, K - 1.
    Raises:  ValueError: a ratio that selects no row, multiples that leave (0, 1], a sentence that does not fit the model, or fewer
             sentences than a group takes.

    >>> from tl_localize import Activations, InjBenchmark, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> benchmark = InjBenchmark(model=model, sequences=[sequence], ratio=0.01, max_steps=2)
    >>> sorted(set(benchmark.run([Activations()]).frame["method"]))
    ['activations', 'random', 'row_norm']
    """

    model: LanguageModel
    sequences: Sequence[MemorizedSequence]
    ratio: Real
    learning_rate: Real | None = None
    max_steps: int | None = None
    stop_loss: Real = 0.05
    seed: int = 0
    multiples: tuple[Real, ...] = (1, 2, 5)
    distractors: int = 0

    def __repr__(self) -> str:
        what = f"{len(self.sequences)} sequences, injection ratio {100 * self.ratio:g} %"
        return f"InjBenchmark({model_name(self.model)!r}, {what}{', with distractors' if self.distractors else ''})"

    def __post_init__(self) -> None:
        check_sequences(self.model, self.sequences)
        draw_sets(NeuronView(self.model), self.ratio, self.seed, self.distractors + 1)  # raises where the sets can't be drawn
        if not self.multiples or not all(0 < self.ratio * multiple <= 1 for multiple in self.multiples):
            raise ValueError(
                f"multiples must keep ratio * multiple in (0, 1], got {self.multiples} with ratio {self.ratio}. "
                "Use a smaller ratio (0.01 is 1 %) or smaller multiples."
            )
        n_neurons = NeuronView(self.model).n_neurons
        if round(n_neurons * self.ratio * min(self.multiples)) == 0:
            raise ValueError(
                f"ratio must select at least one of the {n_neurons} neurons of a layer, got {self.ratio!r} with multiples "
                f"{self.multiples}. Use at least {1 / (min(self.multiples) * n_neurons):.2g}."
            )
        if self.distractors < 0:
            raise ValueError(f"distractors must be a whole number from 0 on, got {self.distractors!r}. 0 is the paper's form.")
        if self.distractors and not self.groups():
            raise ValueError(
                f"distractors must leave at least one group of {self.distractors + 1} sentences that begin with different tokens, got "
                f"{self.distractors} for {len(self.sequences)} sentences. Give more sentences or fewer distractors."
            )

    def run(self, methods: Sequence[Method], progress: Progress | None = None) -> InjResults:
        """Inject, ask every method, count what it found. Random and RowNorm are always among the methods.

        Args:
            methods: anything that maps (model, sequence) to NeuronScores.
            progress: called with the fraction done and what is being done.
        """
        results = InjResults(pd.DataFrame(), self.settings(methods))
        for part in self.stream(methods, progress):
            results = results.joined(part)
        return results

    def stream(self, methods: Sequence[Method], progress: Progress | None = None) -> Iterator[InjResults]:
        """What ``run`` does, piece by piece: the results of one sentence, or of one group."""
        labels = label_methods(with_controls(methods))
        show = progress or (lambda fraction, what: None)
        parts = self.parts()
        for part in parts:

            def show_part(fraction: float, what: str, part: Part = part) -> None:
                show((part.index + fraction) / len(parts), what)

            injection = self.inject(part, lambda fraction, show=show_part: show(fraction / (len(labels) + 1), "inject"))
            pieces: list[InjResults] = []
            for j, (label, method) in enumerate(labels.items()):
                show_part((1 + j) / (len(labels) + 1), label)
                pieces.append(self.measure(part, injection, label, self.localize(part, injection, method)))
            if isinstance(injection, JointInjection):
                pieces.append(self.measure_truth(part, injection))
            yield InjResults.join(pieces, {})
        show(1.0, "done")

    # The steps of a run. Each depends on its arguments alone, so that they can be done in any order, on any machine, and be kept.

    def parts(self) -> list[Part]:
        """The sentences one by one, or in their groups."""
        whole = [replace(sequence, n_prefix=1, id=sequence.id or f"sequence-{i}") for i, sequence in enumerate(self.sequences)]
        if self.distractors:
            return [Part(g, f"group-{g:02d}", self.seed + g, [whole[i] for i in members]) for g, members in enumerate(self.groups())]
        return [Part(i, sequence.id, self.seed + i, [sequence]) for i, sequence in enumerate(whole)]

    def inject(self, part: Part, progress: Report | None = None) -> Injection | JointInjection:
        """Train the rows of one part, alone: side by side with others they would differ in the last digits."""
        settings: dict[str, Any] = {
            "ratio": self.ratio,
            "seed": part.seed,
            "learning_rate": self._learning_rate,
            "max_steps": self._max_steps,
            "stop_loss": self.stop_loss,
        }
        if self.distractors:
            return inject_together(self.model, part.sequences, **settings, progress=progress)
        if progress:
            progress(0.0)
        return inject(self.model, part.sequences[0], **settings)

    def localize(self, part: Part, injection: Injection | JointInjection, method: Method) -> list[tuple[NeuronScores, float]]:
        """What a method says of each sentence of the part, and the seconds it took."""
        with injection.applied(self.model):
            return [timed(method, self.model, sequence) for sequence in part.sequences]

    def measure(
        self, part: Part, injection: Injection | JointInjection, label: str, found: Sequence[tuple[NeuronScores, float]]
    ) -> InjResults:
        """What one method found in one part: recalls, and with distractors what silencing its neurons does."""
        joint = isinstance(injection, JointInjection)
        sets = [one.neurons for one in injection.injections] if joint else [injection.neurons]
        rows: Rows = []
        assignment: Rows = []
        with injection.applied(self.model):
            before = accuracy(self.model, part.sequences) if joint else torch.empty(0)
            for k, (sequence, (scores, seconds)) in enumerate(zip(part.sequences, found, strict=True)):
                others, silenced = None, dict[str, float]()
                if joint:
                    others = NeuronSet(torch.stack([s.mask for j, s in enumerate(sets) if j != k]).any(0))
                    top = scores.top_k(self.ratio)
                    silenced = self._silenced(top, part.sequences, k, before)
                    assignment += [
                        {
                            **self._about_part(part, injection),
                            "method": label,
                            "localized": sequence.id,
                            "whose": other.id,
                            "recall": top.recall_of(theirs),
                        }
                        for other, theirs in zip(part.sequences, sets, strict=True)
                    ]
                about = {"sequence_id": sequence.id, "method": label, **self._about(part, injection, k)}
                rows += [{**about, **recalls, **silenced, "seconds": seconds} for recalls in self._recalls(scores, sets[k], others)]
        return InjResults(pd.DataFrame(rows), {}, assignment=pd.DataFrame(assignment))

    def measure_truth(self, part: Part, joint: JointInjection) -> InjResults:
        """With distractors: is each sentence in its rows alone, and what would a perfect method find?"""
        truth = ground_truth(self.model, joint, part.sequences).assign(**self._about_part(part, joint))
        perfect = {"recall": 1.0, "recall_across_layers": 1.0, "foreign_recall": 0.0, "foreign_recall_across_layers": 0.0}
        rows: Rows = []
        with joint.applied(self.model):
            before = accuracy(self.model, part.sequences)
            for k, (sequence, injection) in enumerate(zip(part.sequences, joint.injections, strict=True)):
                about = {"sequence_id": sequence.id, "method": TRUE_ROWS, **self._about(part, joint, k)}
                silenced = self._silenced(injection.neurons, part.sequences, k, before)
                rows += [{**about, **self._top(multiple), **perfect, **silenced, "seconds": 0.0} for multiple in self.multiples]
        return InjResults(pd.DataFrame(rows), {}, truth)

    def groups(self) -> list[list[int]]:
        """Sentences that share a model, by index: drawn by the seed, no two of a group beginning with the same token."""
        size = self.distractors + 1
        waiting = np.random.RandomState(self.seed).permutation(len(self.sequences)).tolist()
        groups: list[list[int]] = []
        while True:
            group: list[int] = []
            for i in waiting:
                first = {int(self.sequences[j].tokens[0]) for j in group}
                if len(group) < size and int(self.sequences[i].tokens[0]) not in first:
                    group.append(i)
            if len(group) < size:
                return groups
            groups.append(group)
            waiting = [i for i in waiting if i not in group]

    def settings(self, methods: Sequence[Method]) -> dict[str, Any]:
        """Everything that the numbers depend on."""
        return {
            "benchmark": "inj",
            "injection": {
                "ratio": self.ratio,
                "learning_rate": self._learning_rate,
                "max_steps": self._max_steps,
                "stop_loss": self.stop_loss,
                "distractors": self.distractors,
                "seeds": f"{self.seed} + index of the {'group' if self.distractors else 'sentence'}",
            },
            "multiples": [float(multiple) for multiple in self.multiples],
            "n_sequences": len(self.sequences),
            "parts": [part.settings() for part in self.parts()],
            "methods": {label: repr(method) for label, method in label_methods(with_controls(methods)).items()},
            "environment": environment(self.model),
        }

    @property
    def _learning_rate(self) -> Real:
        return self._schedule[0] if self.learning_rate is None else self.learning_rate

    @property
    def _max_steps(self) -> int:
        return self._schedule[1] if self.max_steps is None else self.max_steps

    @property
    def _schedule(self) -> tuple[float, int]:
        alone = next((learning_rate, steps) for largest, learning_rate, steps in INJECTION if self.ratio <= largest)
        return TOGETHER if self.distractors else alone

    def _about_part(self, part: Part, injection: Injection | JointInjection) -> dict[str, Any]:
        n_steps = len(injection.losses)
        return {"injection_ratio": self.ratio, "seed": part.seed, "group": part.name, "steps": n_steps}

    def _about(self, part: Part, injection: Injection | JointInjection, k: int) -> dict[str, Any]:
        """The columns of sentence k of a part that are the same for every method."""
        if isinstance(injection, Injection):
            return {**self._about_part(part, injection), "converged": injection.converged, "loss": float(injection.losses[-1])}
        ends = {"loss": float(injection.losses[-1, k]), "off_kl": float(injection.off_kl[-1, k])}
        return {**self._about_part(part, injection), "converged": bool(injection.converged[k]), **ends}

    def _silenced(self, found: NeuronSet, group: Sequence[MemorizedSequence], k: int, before: torch.Tensor) -> dict[str, float]:
        """Change of accuracy on the own sentence and on the others when the found neurons are silent."""
        with found.dropped_out(self.model):
            change = (accuracy(self.model, group) - before).tolist()
        others = [value for j, value in enumerate(change) if j != k]
        return {"delta_own_accuracy": change[k], "delta_foreign_accuracy": sum(others) / len(others)}

    def _top(self, multiple: Real) -> dict[str, float]:
        return {"ratio": round(self.ratio * multiple, 10), "multiple": multiple}

    def _recalls(self, scores: NeuronScores, own: NeuronSet, others: NeuronSet | None = None) -> Rows:
        """Recall of the own rows, and of the others' (nan without distractors), at each multiple."""
        rows: Rows = []
        for multiple in self.multiples:
            by_layer = scores.top_k(self.ratio * multiple)
            across = scores.top_k(self.ratio * multiple, per="model")
            rows.append(
                {
                    **self._top(multiple),
                    "recall": by_layer.recall_of(own),
                    "recall_across_layers": across.recall_of(own),
                    "foreign_recall": by_layer.recall_of(others) if others else math.nan,
                    "foreign_recall_across_layers": across.recall_of(others) if others else math.nan,
                }
            )
        return rows


def ground_truth(model: LanguageModel, joint: JointInjection, group: Sequence[MemorizedSequence]) -> pd.DataFrame:
    """Is each sentence in its own rows, in all of them and nowhere else? One row per sentence, accuracies as fractions.

    ``all_on`` should be near 1; ``own_off`` (all sets but its own) near ``untouched``; ``other_off`` (mean over the other sets, one taken
    away at a time) near 1.
    """
    untouched = accuracy(model, group)
    with joint.applied(model):
        all_on = accuracy(model, group)
    off: list[torch.Tensor] = []
    for k in range(len(group)):
        with joint.applied(model, without=k):
            off.append(accuracy(model, group))
    without = torch.stack(off)  # [set sentence]
    n = len(group)
    return pd.DataFrame(
        {
            "sequence_id": [sequence.id for sequence in group],
            "untouched": untouched.tolist(),
            "all_on": all_on.tolist(),
            "own_off": without.diagonal().tolist(),
            "other_off": ((without.sum(0) - without.diagonal()) / (n - 1)).tolist() if n > 1 else [math.nan] * n,
            "converged": joint.converged.tolist(),
            "in_the_way": [str(injection.unlearned()) if not injection.converged else "" for injection in joint.injections],
        }
    )


def timed(method: Method, model: LanguageModel, sequence: MemorizedSequence) -> tuple[NeuronScores, float]:
    """Scores, and the seconds they took."""
    started = time.perf_counter()
    scores = check_scores(method(model, sequence), model, method)
    return scores, time.perf_counter() - started


def with_controls(methods: Sequence[Method]) -> list[Method]:
    """The methods, with Random and RowNorm added where they are missing."""
    check_methods(methods)
    controls: tuple[Method, ...] = (RandomBaseline(), RowNorm())
    return [*methods, *(control for control in controls if not any(isinstance(method, type(control)) for method in methods))]


@dataclass(frozen=True, eq=False)
class InjResults:
    """What INJ measured.

    Args:
        frame: one row per sequence x method x ratio: sequence_id, method, injection_ratio, seed, group (the sequence itself without
            distractors), converged, loss, steps, ratio and multiple (of the top share looked at), recall (top share of each layer) and
            recall_across_layers (top share of the model), the same of the other sentences' rows as foreign_recall, seconds. With
            distractors also delta_own_accuracy and delta_foreign_accuracy, the effect of silencing the top 1x of each layer.
        settings: what it was measured with, one record per run.
        truth: with distractors, one row per sequence: accuracy untouched, all_on, own_off, other_off.
        assignment: with distractors, one row per group x method x (localized, whose): share of whose rows among the top 1x.
        missing: what a run was asked for and has not got, one row per sentence or group x method: injection_ratio, group, method, reason.

    >>> from tl_localize import Activations, InjBenchmark, load_model
    >>> from tl_localize.reference import reference_sequences
    >>> model = load_model("reference")
    >>> sequence = reference_sequences(model)[0]
    >>> InjBenchmark(model=model, sequences=[sequence], ratio=0.01, max_steps=2).run([Activations()])
    InjResults(1 sequences x 3 methods, injection ratio 1 %)
    """

    frame: pd.DataFrame
    settings: dict[str, Any] = field(default_factory=dict)
    truth: pd.DataFrame = field(default_factory=pd.DataFrame)
    assignment: pd.DataFrame = field(default_factory=pd.DataFrame)
    missing: pd.DataFrame = field(default_factory=pd.DataFrame)

    def __repr__(self) -> str:
        if not len(self.frame):
            return "InjResults(nothing measured)"
        ratios = ", ".join(f"{100 * ratio:g} %" for ratio in self.frame["injection_ratio"].unique())
        counts = f"{self.frame['sequence_id'].nunique()} sequences x {self.frame['method'].nunique()} methods"
        return f"InjResults({counts}, injection ratio {ratios}{', with distractors' if self.distractors else ''})"

    def _repr_html_(self) -> str:
        if not len(self.frame):
            return f"<div>{self!r}</div>"
        unit = "own / others' rows" if self.distractors else "recall of the injected rows"
        return styled(self.table(), f"{self!r}: {unit} in percent, mean \u00b1 standard error")

    def joined(self, other: InjResults) -> InjResults:
        """These results and one more piece of the same run."""
        return InjResults.join([self, other], self.settings)

    @classmethod
    def join(cls, results: Sequence[InjResults], settings: dict[str, Any] | None = None) -> InjResults:
        """Runs of several injection ratios, or several methods, as one."""
        frames = ([getattr(part, name) for part in results] for name in ("frame", "truth", "assignment", "missing"))
        frame, truth, assignment, missing = (
            pd.concat([f for f in parts if len(f)], ignore_index=True) if any(map(len, parts)) else pd.DataFrame() for parts in frames
        )
        return cls(frame, settings if settings is not None else {"runs": [part.settings for part in results]}, truth, assignment, missing)

    @property
    def distractors(self) -> bool:
        """Whether several sentences were in one model."""
        return len(self.truth) > 0

    def table(self, across_layers: bool = False) -> pd.DataFrame:
        """Recall in percent, mean and standard error, in the layout of the paper's table.

        The error is over sentences; with distractors over groups, and each cell reads own / foreign recall. Injections that did not
        converge are left out of the means; the row label of each ratio says how many there were.

        Args:
            across_layers: top share of the whole model (the paper's global table) in place of each layer.
        """
        suffix = "_across_layers" if across_layers else ""
        columns = [f"recall{suffix}", f"foreign_recall{suffix}"] if self.distractors else [f"recall{suffix}"]
        blocks: list[pd.DataFrame] = []
        for (injection_ratio,), block in self.frame.groupby(["injection_ratio"], sort=False):
            label, used = converged_part(block)
            rows = {
                method: {
                    f"R@{multiple:g}x": " / ".join(percent(by_group(group, column)) for column in columns)
                    for multiple, group in part.groupby("multiple", sort=False)
                }
                for method, part in used.groupby("method", sort=False)
            }
            if self.distractors:
                rows |= self._levels(used)
            if len(self.missing):
                lacking = self.missing[self.missing["injection_ratio"] == injection_ratio]["method"]
                label += f", {len(lacking)} measurements MISSING"
                rows = {method: {**row, "missing": str(int((lacking == method).sum()))} for method, row in rows.items()}
            blocks.append(pd.concat({f"ratio {100 * float(str(injection_ratio)):g} %, {label}": pd.DataFrame(rows).T}))
        return pd.concat(blocks)

    def _levels(self, used: pd.DataFrame) -> dict[str, dict[str, str]]:
        """What two kinds of ignorance score: knowing nothing, and knowing what was altered but not by which sentence."""
        size = used.groupby(["group", "multiple"])["sequence_id"].nunique().max()
        ratio = used["injection_ratio"].iloc[0]
        multiples = used["multiple"].unique()
        nothing = {f"R@{m:g}x": f"{100 * min(1, ratio * m):.1f} / {100 * min(1, ratio * m):.1f}" for m in multiples}
        altered = {f"R@{m:g}x": f"{100 * min(1, m / size):.1f} / {100 * min(1, m / size):.1f}" for m in multiples}
        return {"level: knows nothing": nothing, "level: knows what was altered": altered}

    def silencing_table(self) -> pd.DataFrame:
        """With distractors: change of accuracy in points when the found rows (top 1x of each layer) are silent, own and others'.

        ``true_rows`` is the best that can be done.
        """
        rows = self.frame[self.frame["multiple"] == self.frame["multiple"].min()]
        rows = rows[rows["converged"]]
        return pd.DataFrame(
            {
                method: {
                    "own sentence": percent(by_group(part, "delta_own_accuracy")),
                    "other sentences": percent(by_group(part, "delta_foreign_accuracy")),
                }
                for method, part in rows.groupby("method", sort=False)
            }
        ).T

    def truth_table(self) -> pd.DataFrame:
        """With distractors: accuracy in percent on the injected sentences, untouched, with all sets on, own set off, another's off."""
        columns = ["untouched", "all_on", "own_off", "other_off"]
        label, used = converged_part(self.truth)
        return pd.DataFrame({label: {column: percent(by_group(used, column)) for column in columns}}).T

    def tests(self, reference: str = "integrated_gradients") -> pd.DataFrame:
        """One-tailed paired t-tests: does a method recall more than the reference? Bonferroni-corrected, converged injections only.

        Pairs are sentences; with distractors they are groups, whose sentences share a model.
        """
        used = self.frame[self.frame["converged"] & (self.frame["method"] != TRUE_ROWS)]
        keys = ["group", "method", "injection_ratio", "ratio"]
        means = used.groupby(keys, sort=False)["recall"].mean().reset_index().rename(columns={"group": "sequence_id"})
        return compare_with_reference(means, reference, "recall", ["injection_ratio", "ratio"])

    def save(self, folder: str | Path) -> None:
        """Write the frames as CSV and ``settings.json``, each whole or not at all."""
        path = prepare_folder(folder)
        for name in ("frame", "truth", "assignment", "missing"):
            frame: pd.DataFrame = getattr(self, name)
            if len(frame):
                write_text(path / f"{name}.csv", frame.to_csv(index=False))
            else:
                (path / f"{name}.csv").unlink(missing_ok=True)
        write_json(path / "settings.json", self.settings)


def converged_part(block: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """A label that counts the injections that did not converge, and the rows of those that did (all rows if none did)."""
    state = block.drop_duplicates(["sequence_id", "seed"])["converged"]
    n, failed = len(state), int((~state).sum())
    if failed == n:
        return f"NONE of {n} injections converged", block
    label = f"{n - failed} sentence{'s' * (n - failed != 1)}" + (f" ({failed} more did NOT converge and are left out)" if failed else "")
    return label, block[block["converged"]]


def by_group(rows: pd.DataFrame, column: str) -> pd.Series:
    """Mean of a column over the sentences of each group: what is independent of one another."""
    return rows.groupby("group", sort=False)[column].mean()


def percent(values: pd.Series) -> str:
    """Mean and standard error as text, in percent."""
    return with_error(100 * values)


def compare_seeds(first: InjResults, second: InjResults) -> pd.DataFrame:
    """Do other random rows change the recall? Paired two-tailed t-tests, sentence by sentence, where both injections converged.

    Source: Chang et al. (2024), arXiv:2311.09060, A.6.
    """
    keys = ["sequence_id", "method", "injection_ratio", "ratio"]
    both = first.frame.merge(second.frame, on=keys, suffixes=("", "_other"))
    both = both[both["converged"] & both["converged_other"]]
    rows = [
        {
            **dict(zip(keys[1:], key, strict=True)),
            "recall": group["recall"].mean(),
            "recall_other_seed": group["recall_other"].mean(),
            "p_value": paired_test(group["recall"], group["recall_other"]),
            "n": len(group),
        }
        for key, group in both.groupby(keys[1:], sort=False)
    ]
    return pd.DataFrame(rows)
