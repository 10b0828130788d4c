"""The data users have: files of tokens, texts and named columns, and data sets. Nothing is
downloaded, nothing is unpickled.
"""

from tl_localize.readers.data import Data, kept_by, read_sequences, read_texts, stacked_tokens
from tl_localize.readers.sources import read_tokens

__all__ = ["Data", "kept_by", "read_sequences", "read_texts", "read_tokens", "stacked_tokens"]
