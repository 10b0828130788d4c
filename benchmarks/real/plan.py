"""How much is measured, with which settings, and in which order: PLAN.md as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PAPER_METHODS = "hard_concrete,slimming,zero_out,integrated_gradients,activations"
QUICK = "activations,slimming,hard_concrete,attribution,gradient_alignment,iterative_attribution"
SLOW = "integrated_gradients,zero_out"
IN_APPENDIX = "hard_concrete,slimming,integrated_gradients,activations"  # A.5, A.6
SINGLE_LAYERS = "integrated_gradients,activations,zero_out"
REV_SHARES = (0.05, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
REV_METHODS = "activation_contrast,activations,attribution,gradient_alignment,iterative_attribution"
MASKS = ("slimming", "hard_concrete")
# the tests of this folder, in the order of the plan
ORDER = (
    "test_recited_texts",
    "test_table_3",
    "test_table_3_slow_methods",
    "test_table_2",
    "test_table_2_small_ratio",
    "test_masks_tuned_for_deletion",
    "test_distractors",
    "test_sets_of_the_whole_model",
    "test_single_layers",
    "test_masks_tuned_for_injection",
    "test_seeds",
    "test_expanded_data",
    "test_ablations",
    "test_rev",
    "test_costs",
    "test_exact_zero_out",
    "test_quadrature",
    "test_page",
)
Grid = Mapping[str, tuple[Any, ...]]
# the paper's grid of Slimming, and 12 points of that of Hard Concrete
GRIDS: Mapping[str, Grid] = {
    "slimming": {
        "learning_rate": (0.01, 0.005, 0.001),
        "sparsity_weight": (30000.0, 10000.0, 5000.0, 1000.0),
    },
    "hard_concrete": {
        "learning_rate": (0.01, 0.001),
        "sparsity_weight": (2000.0, 1000.0, 500.0),
        "initial_mask": (0.9, 0.5),
        "temperature": (0.33,),
    },
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What PLAN.md says of one model.

    Args:
        sentences: of ECBD-2021, by injection ratio.
        n_seeds: sentences that are written with three seeds.
        n_expanded: sentences of ECBD-2022 and 2023.
        n_groups: of four sentences that are written together.
        min_accuracy: of a manual text that is a target; None takes all, as in the paper.
        shares: of each layer that DEL ablates.
        counts: neurons of the whole model that DEL ablates.
        general: rows of text for the perplexity, and their tokens.
        n_few_rows: of them, where the perplexity is not what is asked for.
        n_targets: of table 3; all by default. n_zero_out: of Zero-Out there.
        n_counts, n_ablations, n_single_layers, n_quadrature: targets of these studies.
        points: of Integrated Gradients.
        n_rev, n_rev_sentences: models of REV, and sentences in each.
        n_rev_drawn: models for which sentences are drawn; as many as are measured, by default.
        tuned: whether masks are searched; the paper's models have the paper's settings.
        screen: of Zero-Out; None computes every neuron.
        settings: METHOD.SETTING=VALUE, over everything.
        training: of an injection, over everything.
        recipe: of the training of REV, over the default one.
        n_tokens: at most so many of a text.
    """

    sentences: Mapping[float, int | None] = field(default_factory=lambda: {0.01: 12, 0.001: 6})
    n_seeds: int | None = 4
    n_expanded: int | None = 6
    n_groups: int = 4
    min_accuracy: float | None = 0.7
    n_dev: int = 5
    n_targets: int | None = None
    shares: tuple[float, ...] = (0.001, 0.005)
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    general: tuple[int, int] = (128, 32)
    n_few_rows: int = 16
    n_zero_out: int | None = None
    n_counts: int | None = None
    n_ablations: int | None = None
    n_single_layers: int | None = 8
    n_quadrature: int = 4
    points: tuple[int, ...] = (20, 50, 100, 300)
    n_rev: int = 3
    n_rev_drawn: int | None = None
    n_rev_sentences: int = 4
    tuned: bool = True
    grids: Mapping[str, Grid] = field(default_factory=lambda: GRIDS)
    screen: float | None = 0.05
    settings: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    n_tokens: int | None = None

    def limited(self, limit: int | None) -> Plan:
        """The plan with at most so many sentences, targets and models of REV. Groups of distractors
        are drawn together, so their number stays.
        """
        if limit is None:
            return self

        def at_most(n: int | None) -> int:
            return limit if n is None else min(n, limit)

        return replace(
            self,
            sentences={ratio: at_most(n) for ratio, n in self.sentences.items()},
            n_seeds=at_most(self.n_seeds),
            n_expanded=at_most(self.n_expanded),
            n_rev=at_most(self.n_rev),
            n_rev_drawn=self.n_rev,
            n_targets=at_most(self.n_targets),
            n_zero_out=at_most(self.n_zero_out),
            n_counts=at_most(self.n_counts),
            n_ablations=at_most(self.n_ablations),
            n_single_layers=at_most(self.n_single_layers),
            n_quadrature=at_most(self.n_quadrature),
        )


SMALL = Plan()
GEMMA = replace(
    SMALL,
    sentences={0.01: 6, 0.001: 3},
    n_expanded=3,
    n_seeds=3,
    n_zero_out=12,
    n_counts=16,
    n_ablations=16,
)
# on a GPU, as in the paper
PAPER = Plan(
    sentences={0.01: None, 0.001: None},
    n_seeds=None,
    n_expanded=None,
    n_groups=8,
    min_accuracy=None,
    general=(2048, 128),
    n_few_rows=128,
    n_single_layers=None,
    n_rev_sentences=8,
    tuned=False,
    screen=None,
)
TINY_GRIDS: Mapping[str, Grid] = {
    "slimming": {"learning_rate": (0.01, 0.001)},
    "hard_concrete": {"sparsity_weight": (500.0,)},
}
# what every shape can do in seconds; says nothing of localization
REHEARSAL = Plan(
    sentences={0.1: 2, 0.05: 2},
    n_seeds=2,
    n_expanded=1,
    n_groups=1,
    min_accuracy=None,
    n_dev=2,
    shares=(0.1, 0.25),
    counts=(1, 2),
    general=(2, 12),
    n_few_rows=2,
    n_targets=2,
    n_zero_out=2,
    n_counts=2,
    n_ablations=2,
    n_single_layers=1,
    n_quadrature=1,
    points=(2, 4),
    n_rev=1,
    n_rev_sentences=2,
    grids=TINY_GRIDS,
    screen=0.05,
    settings=(
        "slimming.steps=2",
        "hard_concrete.steps=2",
        "integrated_gradients.steps=2",
        "iterative_attribution.rounds=2",
        "iterative_attribution.share=0.25",
        "gradient_alignment.points=1",
    ),
    training={"max_steps": 4, "stop_loss": 20.0},
    recipe={"max_steps": 2, "stop_loss": 20.0},
    n_tokens=12,
)


def plan_of(name: str, rehearse: bool = False) -> Plan:
    """The plan of a model by its name, or the name of its file."""
    from tl_localize.paper import paper_model, published

    of_paper = paper_model(name) in set(published("architecture")["model"])
    if rehearse:
        return replace(REHEARSAL, tuned=not of_paper)
    if of_paper:
        return replace(PAPER, min_accuracy=None if recited_all(name) else SMALL.min_accuracy)
    return GEMMA if Path(name).name.startswith("gemma") else SMALL


def recited_all(name: str) -> bool:
    """Whether the paper has texts that this model recites."""
    from tl_localize.paper import published

    return len(published("del", name)) > 0
