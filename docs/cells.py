"""Numbers, intervals and names as the tables of README.md and docs/ have them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from tl_localize.stats import bootstrap

SMOLLM2, GEMMA = "SmolLM2-135M-Instruct.Q4_1", "gemma-3-270m-q4_k_m"
GPT2, PYTHIA = "reference-gpt2", "reference-pythia"
SHIPPED = {"gpt2": GPT2, "pythia": PYTHIA}
TITLES = {
    "iterative_attribution": "**Iterative Attribution** (ours)",
    "iterative_attribution_contrast_0": "the same, `contrast=0`",
    "iterative_attribution_contrast_3": "the same, `contrast=3`",
    "refined_attribution": "Refined Attribution (ours)",
    "gradient_alignment": "Gradient Alignment (ours)",
    "activation_contrast_same_kind": "**Activation Contrast** (ours), with texts of the same kind",
    "activation_contrast": "Activation Contrast (ours), with texts that the model writes",
    "attribution_contrast_1": "Attribution, `contrast=1`",
    "attribution": "Attribution",
    "hard_concrete": "Hard Concrete",
    "hard_concrete_tuned": "Hard Concrete, tuned",
    "slimming": "Slimming",
    "slimming_tuned": "Slimming, tuned",
    "zero_out": "Zero-Out",
    "integrated_gradients": "Integrated Gradients",
    "activations": "Activations",
    "adversarial_hard_concrete": "AdversarialHardConcrete",
    "balanced_subnet": "BalancedSubnet",
    "selective_pruning": "SelectivePruning",
    "selective_synaptic_dampening": "SelectiveSynapticDampening",
    "contrastive_gradient": "ContrastiveGradient",
    "oracle_mask": "oracle, learned mask (knows the model before, and the other texts)",
    "oracle_rounds": "oracle in rounds (knows the model before)",
    "oracle_first_order": "oracle, first order (knows the model before)",
    "row_norm": "RowNorm (a control)",
    "random": "Random",
}
MASK_RIVALS = ("adversarial_hard_concrete", "balanced_subnet")
GENERAL_RIVALS = ("selective_pruning", "selective_synaptic_dampening", "contrastive_gradient")
RIVALS = {
    "refined_attribution": TITLES["refined_attribution"],
    "iterative_attribution": TITLES["iterative_attribution"],
    "adversarial_hard_concrete": TITLES["adversarial_hard_concrete"],
    "hard_concrete": "Hard Concrete, searched",
    "attribution": TITLES["attribution"],
    "balanced_subnet": TITLES["balanced_subnet"],
    **{name: TITLES[name] for name in ("contrastive_gradient", *GENERAL_RIVALS[:2])},
    "random": "Random",
}
COLUMNS = {
    "delta_self_accuracy": "Self, points",
    "delta_self_levenshtein": "Self, characters",
    "delta_neg_accuracy": "Neg, points",
    "delta_neg_levenshtein": "Neg, characters",
    "delta_perplexity": "rise of perplexity",
}
MULTIPLES = (1, 2, 5)  # of the injected rows


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float, decimals: int = 1) -> str:
    """A number without the sign of a zero; empty where there is none."""
    return "" if np.isnan(value) else f"{round(value, decimals) + 0.0:.{decimals}f}"


def with_interval(value: float, interval: tuple[float, float], decimals: int = 1) -> str:
    low, high = (number(end, decimals) for end in interval)
    return f"{number(value, decimals)} [{low}, {high}]" if low else number(value, decimals)


def mean_with_interval(values: pd.Series, decimals: int = 1) -> str:
    """Over texts; a single number, which is a mean itself, has no interval. Empty without any."""
    known = values.dropna().to_numpy(dtype=float)
    if not len(known):
        return ""
    interval = bootstrap(len(known), lambda drawn: known[drawn].mean(1))
    return with_interval(float(known.mean()), interval, decimals)


def with_t_interval(values: pd.Series, decimals: int = 1) -> str:
    """Mean with the 95 % interval of Student's t, which is wide enough for a few values."""
    half = float(stats.t.ppf(0.975, len(values) - 1) * values.sem())
    mean = float(values.mean())
    return with_interval(mean, (mean - half, mean + half), decimals)


def short(title: str) -> str:
    """A title without what is said about the method."""
    return title.replace("**", "").split(" (")[0]


def power(p: float) -> str:
    """A p-value with one digit, such as 2e-5."""
    return re.sub(r"e-0?", "e-", f"{p:.1g}")
