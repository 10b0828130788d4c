import pytest
import torch


@pytest.fixture
def corpus():
    """Sequences that a model recites, with some suffix tokens exchanged."""
    from recited import recite

    def make(model, n=30):
        generator = torch.Generator().manual_seed(4)
        rows = recite(model, torch.randint(61, (n, 6), generator=generator), 16)
        for i in range(n):
            for _ in range(i % 7):
                rows[i, int(torch.randint(6, 22, (1,), generator=generator))] = int(
                    torch.randint(61, (1,), generator=generator)
                )
        return list(rows)

    return make
