"""Erasing texts from a model: which rows to change, what that costs, and a folder that others
load.
"""

from tl_localize.erasure.erase import erase
from tl_localize.erasure.measures import Price, measure_texts, precision_of
from tl_localize.erasure.result import Erasure
from tl_localize.erasure.row_edit import RowEdit

__all__ = [
    "Erasure",
    "Price",
    "RowEdit",
    "erase",
    "measure_texts",
    "precision_of",
]
