"""REV: sentences are trained into a model that may use all of its rows; which units have to be put
back to what they were before, so that one sentence is forgotten and the others are not?
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from tl_localize.checks import Real, check_count, check_seed, check_several
from tl_localize.evals.rev.oracles import ORACLES, Change
from tl_localize.evals.rev.results import RevResults
from tl_localize.evals.shared import (
    Group,
    check_texts,
    describe_methods,
    draw_groups,
    reporter,
    score,
    scores_of,
    with_controls,
)
from tl_localize.execution.run import Benchmark, Methods
from tl_localize.execution.store import Cell, Json, Lazy, Row, Scope, Settings, Steps, describe
from tl_localize.files import digest
from tl_localize.injection.recipes import (
    RECIPES,
    Learned,
    Recipe,
    Weights,
    assigned,
    check_earlier,
    check_recipe,
    learn,
    read_units,
    trained_parameters,
    units_replaced,
)
from tl_localize.methods import ActivationContrast
from tl_localize.methods.base import Method
from tl_localize.methods.general_text import WithGeneralText
from tl_localize.metrics import accuracy, check_text, sequence_losses
from tl_localize.model.environment import about_model, environment, fingerprint
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronScores
from tl_localize.sequences import (
    MemorizedSequence,
    check_different,
    check_ids,
    check_sequences,
    with_ids,
)
from tl_localize.stats import quantity
from tl_localize.units import NEURONS, Units

SAME_KIND = "same_kind"  # how the label of a method ends that reads texts of the same kind
ALIGNMENT = 0.05  # of Activation Contrast; with so many texts a row's direction is to count less
N_GENERAL = 12  # the first rows of general text, every other one of which is measured


@dataclass(frozen=True, eq=False, repr=False)
class RevBenchmark(Benchmark[RevResults]):
    """What a model forgets when the units that a method names are put back to what they were before
    the model learned a sentence, and what the model before gains when it is given them.

    The sentences come in groups; group g is trained into the model with seed ``seed + g``. Each
    sentence of a group is the target once, the rest are its others. The second half of the groups
    is never trained: Activation Contrast with their texts, which are of the same kind as the
    target, is among the methods (``activation_contrast_same_kind``), and each other method that
    reads general text runs once more with them. So are Random and RowNorm among the methods.
    Three oracles know the model before. ``oracle_first_order`` ranks units by the gradient of the
    target's mean log-odds times the unit's true change, ``oracle_rounds`` does so in ten rounds,
    the units of earlier rounds being put back. ``oracle_mask`` also knows the others: it learns a
    mask over the true changes that loses the target and keeps them.

    Source: weights are put back, or grafted, to localize a skill by Panigrahi et al. (2023),
    arXiv:2302.06600. Ours is the benchmark of methods that see the trained model alone.

    Args:
        sequences: the sentences; each is trained, localized and measured whole, with its first
            token as the prefix. With ``before``, memorized sequences, which keep their prefix.
        general_tokens: [sequence pos] general text: every other one of the first 12 rows is
            measured, the rest are trained beside the sentences where the recipe mixes them in,
            which takes 2 rows at least.
        before: an earlier checkpoint of the model, in place of training: targets are those
            sequences that the model recites; none that the checkpoint recites too is accepted.
        n_sequences: sentences in one model; with one, others are not measured. Like ``n_groups``
            and ``recipe`` of the training, and left out with ``before``.
        n_groups: how many models are trained; by default half of the groups that the sentences
            fill, at most 3.
        ratios: shares of each layer that are put back.
        recipe: how the sentences are trained into the model.
        seed: of the groups and of what training draws.
        units: what is scored and put back; of heads the rows of W_O.

    Raises:
        ValueError: a ratio that selects no unit, too few sentences, a checkpoint of another model
            or that recites a text too, texts that the model can't read.

    >>> benchmark = RevBenchmark(model, few, text, n_sequences=1, recipe=Recipe(max_steps=2))
    >>> [len(group.sequences) for group in benchmark.groups()]  # and one that is not trained
    [1, 1]
    >>> sorted(set(rev_results.frame["method"]))  # of benchmark.run([Activations()])
    ['activations', 'oracle_first_order', 'oracle_mask', 'oracle_rounds', 'random', 'row_norm']
    """

    model: LanguageModel
    sequences: Sequence[MemorizedSequence]
    general_tokens: Integer[Tensor, "sequence pos"]
    _: KW_ONLY
    before: LanguageModel | None = None
    n_sequences: int = 8
    n_groups: int | None = None
    ratios: tuple[Real, ...] = (0.05, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4)
    recipe: Recipe = RECIPES["adam"]
    seed: int = 0
    units: Units = NEURONS
    min_accuracy: ClassVar[float] = 0.9  # of a text that a checkpoint's later model recites

    def __post_init__(self) -> None:
        sequences = check_sequences(self.model, self.sequences)
        object.__setattr__(self, "sequences", sequences)  # also of an iterator
        check_ids(sequences)
        if self.before is not None:
            check_different(sequences)  # all of them are one group
        check_text(self.model, self.general_tokens, "general_tokens")
        check_recipe(self.recipe)
        if self.recipe.general and len(self.general_tokens) < 2:
            raise ValueError(
                "general_tokens must have 2 rows or more where the recipe mixes them in, got 1, "
                "which would be trained and measured. Give more text."
            )
        check_count(n_sequences=self.n_sequences)
        check_seed(self.seed, bits=32)
        if self.n_groups is not None:
            check_count(n_groups=self.n_groups)
        if self.before is not None:
            self._check_untrained()
        view = NeuronView(self.model, self.units)
        if self.before is None:
            trained_parameters(view, self.recipe.weights)  # raises where they can't be trained
        check_several(ratios=self.ratios)
        blank = NeuronScores(torch.zeros(view.size), units=self.units)
        for ratio in self.ratios:
            blank.top_k(ratio)  # raises where it selects none
        names = [f"{float(ratio):g}" for ratio in self.ratios]  # of the cells of a folder
        rises = all(ratio < larger for ratio, larger in pairwise(self.ratios))
        if not self.ratios or not rises or len(set(names)) < len(names):
            raise ValueError(
                f"ratios must be fractions in rising order that differ in six digits, got "
                f"{self.ratios}. Write for example (0.1, 0.2)."
            )
        if self.before is not None:
            check_earlier(self.model, self.before)
        if len(self.groups()) < (self.n_groups or 1):
            size = 2 * (self.n_groups or 1) - 1  # the second half is not trained
            raise ValueError(
                f"sequences must fill {quantity(size, 'group')} of {self.n_sequences} that begin "
                f"with different tokens, got {len(self.sequences)}. Give more, or fewer groups."
            )

    def _check_untrained(self) -> None:
        """Raise ValueError where a setting of the training is given and nothing is trained."""
        default = type(self)
        n_groups = None if self.n_groups == 1 else self.n_groups
        given: dict[str, tuple[object, object]] = {
            "n_sequences": (self.n_sequences, default.n_sequences),
            "n_groups": (n_groups, None),
            "recipe": (self.recipe, default.recipe),
        }
        for name, (value, unset) in given.items():
            if value != unset:
                raise ValueError(
                    f"{name} must be left out with an earlier checkpoint, got {value}. Nothing is "
                    "trained, and its texts are one group."
                )

    def groups(self, parts: int = 1) -> list[Group]:
        """The sentences of each model. With an earlier checkpoint, one group of all targets."""
        return self._groups

    @cached_property
    def _groups(self) -> list[Group]:
        drawn = self._halves[0][: self.n_groups or 3] if self.before is None else []
        if self.before is not None:
            drawn = [self._targets(self.before)]
        return [Group(f"group-{i:02d}", self.seed + i, members) for i, members in enumerate(drawn)]

    @cached_property
    def _halves(self) -> tuple[list[list[MemorizedSequence]], list[list[MemorizedSequence]]]:
        """The groups that may be trained and those that never are: drawn by the seed, no two
        sentences of a group beginning with the same token.
        """
        whole = [sequence.whole for sequence in with_ids(self.sequences)]
        groups = draw_groups(whole, self.n_sequences, self.seed)
        half = math.ceil(len(groups) / 2)
        return groups[:half], groups[half:]

    def _targets(self, before: LanguageModel) -> list[MemorizedSequence]:
        """The sequences that the model recites; ValueError where there are none, or where the
        checkpoint recites one too.
        """
        every = with_ids(self.sequences)
        now, then = accuracy(self.model, every), accuracy(before, every)
        learned = [every[i] for i in (now >= self.min_accuracy).nonzero().flatten().tolist()]
        for i, sequence in enumerate(every):
            if min(now[i], then[i]) >= self.min_accuracy:
                raise ValueError(
                    f"sequences must be texts that the earlier checkpoint does not recite, got "
                    f"{sequence.id!r}, which both recite. Leave it out, or give an earlier "
                    "checkpoint."
                )
        if not learned:
            raise ValueError(
                f"sequences must hold one that the model recites at {self.min_accuracy:g}, got "
                f"none among {len(every)}. Give other texts."
            )
        return learned

    def label(self, methods: Sequence[Method]) -> Methods:
        """The methods by label; the controls and the oracles are always among them."""
        labelled: dict[str, Any] = with_controls(methods, self.units)
        check_texts(labelled, [each for group in self.groups() for each in group.sequences])
        if self.before is None:
            untrained = [sequence for group in self._halves[1] for sequence in group]
            texts = tuple(tuple(sequence.tokens.tolist()) for sequence in untrained)
            if texts:
                ours = ActivationContrast(texts=texts, alignment=ALIGNMENT, units=self.units)
                with_texts = {ours.name: ours} | {
                    label: replace(method, texts=texts)
                    for label, method in labelled.items()
                    if isinstance(method, WithGeneralText)
                    and not isinstance(method, ActivationContrast)
                    and not method.texts
                }
                labelled |= {f"{label}_{SAME_KIND}": twin for label, twin in with_texts.items()}
        return labelled | ORACLES

    def settings(self, methods: Methods) -> Settings:
        settings: Json = {
            **about_model(self.model),
            "seed": self.seed,
            "units": describe(self.units),
            "recipe": describe(self.recipe),
            "before": fingerprint(self.before) if self.before is not None else "",
            "general_text": digest(self.general_tokens),
        }
        groups = self.groups()
        parts = [
            [
                group.name,
                digest([[sequence.id, sequence.fingerprint] for sequence in group.sequences]),
            ]
            for group in groups
        ]
        scope = Scope({}, describe_methods(methods, len(groups)))
        scopes = {f"{float(ratio):g}": scope for ratio in self.ratios}
        return Settings("rev", settings, parts, scopes, [environment(self.model)])

    def rows(self, group: Group, methods: Methods, steps: Steps) -> Iterator[Row]:
        """What each method finds for each sentence of a group, in both directions."""
        fingerprints = [sequence.fingerprint for sequence in group.sequences]
        how: Json = {**steps.agreed, "sequences": fingerprints, "group": group.name}
        trained = {"step": "learn", **how, "draw": group.seed}
        learned = Lazy(lambda: steps.get(trained, lambda: self._learn(group, steps)))
        ids = [sequence.id for sequence in group.sequences]
        intact: dict[str, np.ndarray] = {}  # what _measure finds with no unit exchanged
        for label, method in methods.items():
            inputs: Json = {"step": "rev", **how, "label": label, "ids": ids}
            inputs |= {"method": describe(method), "version": getattr(method, "version", 0)}
            scored = Lazy(partial(self._scores, group, label, method, learned, trained, steps))
            for ratio in map(float, self.ratios):
                cell = Cell(label, group.name, f"{ratio:g}")
                compute = partial(
                    self._exchange, group, cell, ratio, scored, learned, intact, steps
                )
                yield from steps.rows(cell, inputs | {"ratio": ratio}, compute)

    def _learn(self, group: Group, steps: Steps) -> Learned:
        """The weights of the other model: trained, or those of the earlier checkpoint."""
        if self.before is not None:
            return Learned(check_earlier(self.model, self.before), torch.zeros(1, 0), True)
        text = self.general_tokens
        mixed = torch.cat([text[:N_GENERAL:2], text[N_GENERAL:]])
        return learn(
            self.model,
            group.sequences,
            self.recipe,
            general_tokens=mixed if self.recipe.general else None,
            seed=group.seed,
            units=self.units,
            progress=reporter(steps, f"train {group.name}"),
        )

    def _before_and_after(self, other: Learned) -> tuple[Weights, Weights]:
        """The weights that training changed, in the model before and in the model after."""
        parameters = dict(self.model.named_parameters())
        kept = {name: parameters[name].detach().clone() for name in other.weights}
        return (kept, other.weights) if self.before is None else (other.weights, kept)

    @torch.inference_mode(False)  # whatever mode the caller is in
    @torch.enable_grad()
    def _scores(
        self,
        group: Group,
        label: str,
        method: Any,
        learned: Lazy[Learned],
        trained: Json,
        steps: Steps,
    ) -> list[NeuronScores]:
        """One method's scores of each sentence, in the model after."""
        view = NeuronView(self.model, self.units)
        before, after = self._before_and_after(learned())
        with assigned(self.model, after):
            if label in ORACLES:
                units = read_units(view, before), read_units(view, after)
                known = Change(view, group.sequences, list(after), *units)
                about: Json = {"step": "oracle", "learned": trained, "oracle": describe(method)}
                about["version"] = getattr(method, "version", 0)
                each = [
                    steps.get(about | {"sequence": target.fingerprint}, partial(method, known, k))
                    for k, target in enumerate(group.sequences)
                ]
                return [replace(scores, units=self.units) for scores in each]
            made_of = {"learned": trained}
            scored = score(
                method, self.model, group.sequences, steps, made_of=made_of, units=self.units
            )
            return [scores_of(found).scores for found in scored]

    @torch.inference_mode(False)
    def _exchange(
        self,
        group: Group,
        cell: Cell,
        ratio: float,
        scored: Lazy[list[NeuronScores]],
        learned: Lazy[Learned],
        intact: dict[str, np.ndarray],
        steps: Steps,
    ) -> list[Row]:
        """Exchange the units that one method names between the two models, and measure."""
        view = NeuronView(self.model, self.units)
        scores, other = scored(), learned()
        before, after = self._before_and_after(other)
        directions = {"put_back": (after, before), "graft": (before, after)}
        rows: list[Row] = []
        for direction, (start, source) in directions.items():
            about = {"method": cell.method, "group": group.name, "direction": direction}
            how = {"converged": other.converged, "steps": len(other.losses)}
            values = read_units(view, source)
            with assigned(self.model, start):
                if direction not in intact:  # of every method the same
                    intact[direction] = self._measure(group)
                for k, target in enumerate(group.sequences):
                    with units_replaced(view, scores[k].top_k(ratio).mask, values):
                        changes = (self._measure(group) - intact[direction]).tolist()
                    general, own = changes.pop(), changes.pop(k)
                    others = sum(changes) / len(changes) if changes else math.nan
                    row = {
                        "sequence_id": target.id,
                        "ratio": ratio,
                        "delta_own_accuracy": own,
                        "delta_others_accuracy": others,
                        "delta_general_loss": general,
                    }
                    rows.append({"model": steps.agreed["model"], **about, **how, **row})
            steps.report(0.5 if direction == "put_back" else 1.0, f"{cell.method} on {cell.part}")
        return rows

    @torch.no_grad()
    def _measure(self, group: Group) -> np.ndarray:
        """The accuracy of each sentence, and the loss of general text, nats per token."""
        text = self.general_tokens
        if len(text) > 1:
            text = text[1:N_GENERAL:2]
        general = sequence_losses(self.model, text)
        return np.append(accuracy(self.model, group.sequences).double(), general.double().mean())

    def results(self, steps: Steps) -> RevResults:
        return RevResults.of(steps)
