"""What the tests of this room share: criteria for tiny models, a spelling, and greedy continuation
without a cache.
"""

import torch

from tl_localize.collect import Criteria

CRITERIA = Criteria(
    n_prefix=6, n_suffix=16, min_accuracy=0.7, max_distance=6, min_distinct=3, ngram=3
)


def letters(ids):
    return "".join(chr(65 + i) + (chr(97 + i % 7) if i % 3 else "") for i in ids)


@torch.no_grad()
def recite(model, tokens, n):
    """Greedy continuation of each row by n tokens, without a cache."""
    for _ in range(n):
        tokens = torch.cat(
            [tokens, model(tokens, padding_side="right")[:, -1].argmax(-1, keepdim=True)], 1
        )
    return tokens
