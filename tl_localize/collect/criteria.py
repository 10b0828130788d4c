"""What counts as memorized, and how many sequences each criterion removes."""

import math
from dataclasses import dataclass, field

import pandas as pd

from tl_localize.checks import Real, check_between, check_count

SHORT, REPETITIVE, INACCURATE = "too short", "few distinct tokens in the true suffix", "accuracy"
REPEATED, DISTANT, MONOTONOUS = (
    "exact duplicate",
    "distance of the greedy continuation",
    "few distinct tokens in the generated suffix",
)
NEAR, SURPLUS = "near-duplicate", "not drawn"
# in the order in which they are applied
CRITERIA = (SHORT, REPETITIVE, INACCURATE, REPEATED, DISTANT, MONOTONOUS, NEAR, SURPLUS)


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """What counts as memorized.

    Source: Chang et al. (2024), arXiv:2311.09060, section 3.2 and appendix
    (details of data collection).

    Args:
        n_prefix: tokens that prompt the model.
        n_suffix: tokens that it must recite.
        min_accuracy: teacher-forced argmax, share of the suffix tokens.
        max_distance: Levenshtein distance of the greedily generated suffix to the true one,
            characters (tokens, where the model has no tokenizer).
        min_distinct: distinct tokens in the suffix, the true one and the generated one.
        max_jaccard: sequences with a larger Jaccard index of their n-gram sets are near-duplicates.
        ngram: tokens of an n-gram.

    >>> criteria = Criteria(n_prefix=10, n_suffix=20)
    >>> criteria.length, criteria.max_misses  # an accuracy of 0.9 forgives 2 of 20 tokens
    (30, 2)
    """

    n_prefix: int = 32
    n_suffix: int = 48
    min_accuracy: Real = 0.9
    max_distance: int = 20
    min_distinct: int = 16
    max_jaccard: Real = 0.05
    ngram: int = 5

    def __post_init__(self) -> None:
        check_count(n_prefix=self.n_prefix, n_suffix=self.n_suffix)
        check_between(0, math.inf, max_distance=self.max_distance)
        check_between(0, 1, min_accuracy=self.min_accuracy, max_jaccard=self.max_jaccard)
        check_count(0, min_distinct=self.min_distinct)
        check_between(0, self.n_suffix, min_distinct=self.min_distinct)
        check_count(ngram=self.ngram)
        check_between(1, self.length, ngram=self.ngram)

    @property
    def length(self) -> int:
        return self.n_prefix + self.n_suffix

    @property
    def max_misses(self) -> int:
        """Suffix tokens that may be predicted wrong."""
        return math.floor((1 - self.min_accuracy) * self.n_suffix + 1e-9)


@dataclass(eq=False)
class Report:
    """How many sequences came in, and how many each criterion removed.

    >>> report = Report(10)
    >>> report.removed["accuracy"] += 1
    >>> report.n_out, report.table().loc["accuracy"].tolist()
    (9, [1, 9])
    """

    n_in: int = 0
    removed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CRITERIA, 0))

    def add(self, later: "Report") -> None:
        self.n_in += later.n_in
        for criterion in CRITERIA:
            self.removed[criterion] += later.removed[criterion]

    @property
    def n_out(self) -> int:
        return self.n_in - sum(self.removed.values())

    def table(self) -> pd.DataFrame:
        """One row per criterion, in the order in which they were applied: removed, left."""
        removed = pd.Series(self.removed)
        frame = pd.DataFrame({"removed": removed, "left": self.n_in - removed.cumsum()})
        return frame.rename_axis("criterion")

    def __str__(self) -> str:
        removed = [f"{n} removed: {name}" for name, n in self.removed.items() if n]
        return ", ".join([f"{self.n_in} came in", *removed, f"{self.n_out} left"])
