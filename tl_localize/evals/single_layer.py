"""The study of single layers: one layer against all layers, at the same number of neurons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import pandas as pd
import torch

from tl_localize.evals.del_benchmark import Deletion
from tl_localize.evals.del_results import frame_of, measured
from tl_localize.execution.engine import Methods
from tl_localize.execution.store import Cache
from tl_localize.methods import METHODS
from tl_localize.methods.base import Method
from tl_localize.neurons import Real, check_count
from tl_localize.scores import NeuronScores, NeuronSet, rounded_down


@dataclass(frozen=True, eq=False)
class SingleLayerStudy(Deletion[pd.DataFrame]):
    """DEL with the neurons of one layer against those of all layers, at equal budget, for methods
    whose scores of a layer mean something without the other layers.

    In each single layer the top N = ratio x d_mlp x (L - first_layer) neurons are ablated (rounded
    down), and ``multiple`` x N. Beside them stands the usual share of every layer from first_layer
    on; there ``layer`` is missing. It reads and fills the results folder of ``DelBenchmark``, which
    has the same scores.

    Source: Chang et al. (2024), arXiv:2311.09060, section 5.4 and A.7.

    Args:
        multiples: Of the budget.

    Returns:
        ``run`` gives a frame: the columns of ``DelResults.frame``, and ``layer`` and ``multiple``.

    Raises:
        ValueError: A learned mask, which is of all layers together; a multiple of the budget that
            is more than a layer has.

    >>> study = SingleLayerStudy(model, few, text, ratios=(0.02,), n_dev=1)
    >>> study.run([Activations()])["layer"].nunique()
    6
    """

    kind: ClassVar[str] = "single_layer"
    _: KW_ONLY
    multiples: tuple[int, ...] = (1, 5)

    def labelled(self, methods: Sequence[Method]) -> Methods:
        labelled = super().labelled(methods)
        for method in methods:
            if not getattr(method, "by_layer", True):
                able = [name for name, kind in METHODS.items() if kind.by_layer]
                raise ValueError(
                    f"method must score each layer by itself for single layers, got {method!r}, "
                    f"which learns all layers together. Use one of {', '.join(able)}."
                )
        return labelled

    def _inputs(self) -> dict[str, Any]:
        return {"multiples": list(self.multiples)}

    def _sets(self, scores: NeuronScores, ratio: Real) -> list[tuple[dict[str, Any], NeuronSet]]:
        everywhere = scores.top_k(ratio, first_layer=self.first_layer, rounding="floor")
        sets: list[tuple[dict[str, Any], NeuronSet]] = []
        sets.append(({"layer": None, "multiple": 1}, everywhere))
        n_layers, n = scores.values.shape
        budget = rounded_down(ratio, n * (n_layers - self.first_layer))
        for layer, values in enumerate(scores.values):
            for multiple in self.multiples:
                check_count(multiples=multiple)
                if multiple * budget > n:
                    raise ValueError(
                        f"multiples must keep multiple * {budget} in [1, {n}], the "
                        f"{self.units.name} of one layer, got {multiple}. Use a smaller multiple "
                        "or ratio."
                    )
                best = values.argsort(descending=True, stable=True)[: multiple * budget]
                mask = torch.zeros_like(scores.values, dtype=torch.bool)
                mask[layer, best] = True
                about = {"layer": layer, "multiple": multiple}
                sets.append((about, NeuronSet(mask, scores.units)))
        return sets

    def results(self, cache: Cache) -> pd.DataFrame:
        return single_layers(cache)


def single_layers(cache: Cache) -> pd.DataFrame:
    """What ``SingleLayerStudy`` has measured so far, of all methods and ratios; empty where nothing
    is measured.
    """
    before, effects = measured(cache, "single_layer")
    if not len(effects):
        return pd.DataFrame()
    about = effects[["layer", "multiple"]].astype({"layer": "Int64"})
    return frame_of(effects, before).join(about)
