"""Injection: sequences written into chosen rows of W_out."""

from tl_localize.injection.injected import Injection, JointInjection, draw_sets, rows_replaced
from tl_localize.injection.recipes import (
    RECIPES,
    Learned,
    Recipe,
    assigned,
    learn,
    read_units,
    units_replaced,
)
from tl_localize.injection.training import TrainingState, inject, inject_together

__all__ = [
    "RECIPES",
    "Injection",
    "JointInjection",
    "Learned",
    "Recipe",
    "TrainingState",
    "assigned",
    "draw_sets",
    "inject",
    "inject_together",
    "learn",
    "read_units",
    "rows_replaced",
    "units_replaced",
]
