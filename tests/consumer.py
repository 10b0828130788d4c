"""What a user's type checker sees of the installed package: .ci/run gives this file to pyright,
nobody runs it.
"""

from collections.abc import Iterator

import pandas as pd
from transformer_lens import HookedTransformer
from transformer_lens.model_bridge import TransformerBridge
from typing_extensions import assert_type

from tl_localize import (
    DelResults,
    HardConcrete,
    Injection,
    InjResults,
    MemorizedSequence,
    NeuronScores,
    NeuronSet,
    inject,
    load_model,
)

model = load_model("reference")
assert_type(model, HookedTransformer | TransformerBridge)
sequence = MemorizedSequence.from_text(model, "Return the", " value")
method = HardConcrete(steps=5)
scores = assert_type(method(model, sequence), NeuronScores)
assert_type(method.map(model, [sequence]), Iterator[NeuronScores])
neurons = assert_type(scores.top_k(0.01, per="model"), NeuronSet)
assert_type(neurons.recall_of(neurons), float)
assert_type(inject(model, sequence, ratio=0.01, seed=0, learning_rate=0.01), Injection)


def of_your_own(hooked: HookedTransformer, bridge: TransformerBridge) -> None:
    assert_type(method(hooked, sequence), NeuronScores)
    assert_type(method(bridge, sequence), NeuronScores)


def tables(inj: InjResults, forgotten: DelResults) -> None:
    assert_type(inj.table(), pd.DataFrame)
    assert_type(forgotten.frame, pd.DataFrame)


scores.top_k(0.01, per="neuron")  # pyright: ignore[reportArgumentType] - must be an error
HardConcrete(learing_rate=1)  # pyright: ignore[reportCallIssue] - must be an error
