"""What holds for every entry of METHODS, on every family of models."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tl_localize import METHODS, MemorizedSequence, NeuronScores
from tl_localize.identity import identity_text
from tl_localize.methods.random_baseline import mixed

SHORT: dict[str, dict[str, Any]] = {
    "hard_concrete": {"steps": 11, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "slimming": {"steps": 11, "learning_rate": 0.05, "sparsity_weight": 5.0},
    "integrated_gradients": {"steps": 3},
    "gradient_alignment": {"points": 2},
    "iterative_attribution": {"rounds": 2},
}
TRAINED = ("hard_concrete", "slimming")
ONE_PASS = ("activations", "attribution")  # one forward pass for a batch of sequences


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Any:
    return METHODS[request.param](**SHORT.get(request.param, {}))


def close(method: Any, found: NeuronScores, wanted: NeuronScores) -> None:
    """Equal to float tolerance: Adam turns noise in the last digits into steps, where a gradient is
    nearly zero.
    """
    tolerance = 2e-3 if method.name in TRAINED else 2e-6
    torch.testing.assert_close(found.values, wanted.values, atol=tolerance, rtol=1e-4)


def raising(after: int, error: BaseException) -> Any:
    """A user's hook that raises at its ``after``-th call."""
    calls = [0]

    def hook(act: torch.Tensor, hook: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] > after:
            raise error
        return act

    return hook


# ---- what comes back


def test_method_scores_every_neuron_and_the_same_seed_gives_the_same_bits(
    any_model: Any, sequence: Any, method: Any
) -> None:
    before = torch.get_rng_state()
    scores = method(any_model, sequence)
    values = scores.values
    assert values.shape == (any_model.cfg.n_layers, any_model.cfg.d_mlp)
    assert values.isfinite().all() and values.dtype == torch.float32 and values.device.type == "cpu"
    assert (values.std(dim=1) > 0).all()
    assert (scores.method, scores.sequence_id, scores.settings) == (
        method.name,
        sequence.id,
        identity_text(method),
    )
    assert torch.equal(method(any_model, sequence).values, values)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["random", "hard_concrete"])
def test_method_other_seed_other_scores(gpt2_like: Any, sequence: Any, name: str) -> None:
    one, two = (
        METHODS[name](**SHORT.get(name, {}), seed=seed)(gpt2_like, sequence).values
        for seed in (0, 1)
    )
    assert not torch.equal(one, two)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "row_norm"])
def test_method_scores_depend_on_the_sequence(
    gpt2_like: Any, make_sequences: Any, name: str
) -> None:
    one, two = METHODS[name](**SHORT.get(name, {})).map(gpt2_like, make_sequences((9, 3), (9, 3)))
    assert not torch.equal(one.values, two.values)


# ---- many sequences


def test_map_equals_single_calls(any_model: Any, sequences: Any, method: Any) -> None:
    for found, sequence in zip(method.map(any_model, sequences), sequences, strict=True):
        close(method, found, method(any_model, sequence))


def test_map_keeps_the_order(gpt2_like: Any, sequences: Any, method: Any) -> None:
    assert [scores.sequence_id for scores in method.map(gpt2_like, sequences, batch_size=3)] == [
        "s0",
        "s1",
        "s2",
        "s3",
    ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_map_batch_size_does_not_matter(
    gpt2_like: Any, sequences: Any, method: Any, batch_size: int
) -> None:
    together = list(method.map(gpt2_like, sequences))
    for found, wanted in zip(
        method.map(gpt2_like, sequences, batch_size=batch_size), together, strict=True
    ):
        close(method, found, wanted)


def test_batch_tokens_do_not_matter(any_model: Any, sequence: Any, method: Any) -> None:
    close(
        method, replace(method, batch_tokens=25)(any_model, sequence), method(any_model, sequence)
    )


def test_map_order_in_the_batch_does_not_matter(
    gpt2_like: Any, sequences: Any, method: Any
) -> None:
    forward = list(method.map(gpt2_like, sequences))
    for found, wanted in zip(method.map(gpt2_like, sequences[::-1]), forward[::-1], strict=True):
        close(method, found, wanted)


def test_map_same_sequence_twice(gpt2_like: Any, sequence: Any, method: Any) -> None:
    first, second = method.map(gpt2_like, [sequence, sequence])
    close(method, first, second)


def test_map_takes_an_iterator(
    gpt2_like: Any, unchecked: None, sequences: Any, method: Any
) -> None:
    assert len(list(method.map(gpt2_like, iter(sequences)))) == 4


@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(length=st.integers(2, 8), longer=st.integers(11, 16), seed=st.integers(0, 9), data=st.data())
@pytest.mark.parametrize("name", METHODS)
def test_padding_never_changes_a_score(
    neox_like: Any, make_sequences: Any, name: str, length: int, longer: int, seed: int, data: Any
) -> None:
    settings = SHORT.get(name, {})
    method = METHODS[name](**settings | ({"steps": 2} if "steps" in settings else {}))
    sequence, long = make_sequences(
        (length, data.draw(st.integers(1, length - 1))), (longer, 1), seed=seed
    )
    close(method, next(method.map(neox_like, [sequence, long])), method(neox_like, sequence))


def test_map_progress_rises_to_one(gpt2_like: Any, sequences: Any, method: Any) -> None:
    seen: list[float] = []
    list(method.map(gpt2_like, sequences, batch_size=2, progress=seen.append))
    assert seen == sorted(seen) and seen[-1] == 1 and min(seen) >= 0


@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_map_loses_only_the_sequence_whose_numbers_are_not_finite(
    gpt2_like: Any, unchecked: None, method: Any, batch_size: int | None
) -> None:
    good = [
        MemorizedSequence(torch.tensor(ids), 2, name)
        for ids, name in (([5, 6, 7, 8, 9], "a"), ([9, 8, 7, 6], "c"), ([4, 5, 6], "d"))
    ]
    wanted = list(method.map(gpt2_like, good))
    gpt2_like.W_E.data[3] = torch.nan
    bad = MemorizedSequence(torch.tensor([5, 3, 7, 8]), 2, "b")
    found = method.map(gpt2_like, [good[0], bad, *good[1:]], batch_size=batch_size)
    close(method, next(found), wanted[0])
    if method.name not in ("random", "row_norm"):
        with pytest.raises(ValueError, match=r"must be finite, got .*'b'"):
            next(found)
    else:
        next(found)
    for one, other in zip(found, wanted[1:], strict=True):
        assert one.sequence_id == other.sequence_id
        close(method, one, other)


# ---- nothing is left behind


def test_method_leaves_the_model_as_it_was(
    any_model: Any, sequences: Any, method: Any, unchanged: Any
) -> None:
    any_model.blocks[1].mlp.W_in.requires_grad_(False)
    check = unchanged(any_model)
    list(method.map(any_model, sequences[:2]))
    check()


@pytest.mark.parametrize(
    "error", [ValueError("the user's"), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("random", "row_norm")])
def test_method_leaves_the_model_as_it_was_when_it_raises(
    any_model: Any, sequence: Any, unchanged: Any, name: str, error: BaseException, after: int
) -> None:
    method = METHODS[name](**SHORT.get(name, {}))
    any_model.add_hook("blocks.1.hook_resid_post", raising(0 if name in ONE_PASS else after, error))
    check = unchanged(any_model)
    with pytest.raises(type(error)):
        method(any_model, sequence)
    check()


def test_method_keeps_the_users_hooks(
    gpt2_like: Any, sequence: Any, method: Any, unchanged: Any
) -> None:
    seen: list[int] = []

    def hook(act: torch.Tensor, hook: Any) -> None:
        seen.append(1)

    gpt2_like.add_hook("blocks.0.mlp.hook_post", hook)
    check = unchanged(gpt2_like)
    method(gpt2_like, sequence)
    check()
    seen.clear()
    gpt2_like(sequence.tokens)
    assert seen == [1]


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("random", "row_norm")])
def test_method_scores_the_model_with_the_users_hooks(
    any_model: Any, sequence: Any, name: str
) -> None:
    method = METHODS[name](**SHORT.get(name, {}))
    before = method(any_model, sequence).values
    with any_model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda act, hook: act * 0.3)]):
        assert (method(any_model, sequence).values - before).abs().max() > 1e-5


def test_map_left_early_leaves_the_model_as_it_was(
    gpt2_like: Any, sequences: Any, method: Any, unchanged: Any
) -> None:
    check = unchanged(gpt2_like)
    next(method.map(gpt2_like, sequences, batch_size=1))
    check()


def test_map_has_no_hook_on_the_model_between_two_scores(
    gpt2_like: Any, sequences: Any, method: Any, unchanged: Any
) -> None:
    check = unchanged(gpt2_like)
    for _ in method.map(gpt2_like, sequences, batch_size=1):
        check()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_method_does_not_mind_the_callers_gradient_mode(
    gpt2_like: Any, sequence: Any, method: Any, mode: Any
) -> None:
    wanted = method(gpt2_like, sequence)
    with mode():
        close(method, method(gpt2_like, sequence), wanted)


def test_method_leaves_the_gradient_mode_alone(gpt2_like: Any, sequences: Any, method: Any) -> None:
    for _ in method.map(gpt2_like, sequences, batch_size=2):
        assert torch.is_grad_enabled()


# ---- memory


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("random", "row_norm")])
def test_out_of_memory_changes_nothing_but_a_warning(
    gpt2_like: Any, sequences: Any, unchanged: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    method = METHODS[name](**SHORT.get(name, {}))
    wanted = list(method.map(gpt2_like, sequences))
    check = unchanged(gpt2_like)
    forward = type(gpt2_like.blocks[1]).forward
    calls = [0]

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] in (1, 3):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(gpt2_like.blocks[1]), "forward", failing)
    if name in ("activations", *TRAINED):
        with pytest.warns(RuntimeWarning, match="Out of memory with a batch of") as caught:
            found = list(method.map(gpt2_like, sequences))
        assert len(caught) == 1
    else:
        with pytest.warns(RuntimeWarning, match="Out of memory with a batch of"):
            found = list(method.map(gpt2_like, sequences))
    for one, other in zip(found, wanted, strict=True):
        close(method, one, other)
    check()


# ---- plain data


def test_method_survives_pickle(method: Any) -> None:
    assert pickle.loads(pickle.dumps(method)) == method


def test_method_is_frozen(method: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        method.batch_tokens = 3


def test_method_is_hashable(method: Any) -> None:
    assert len({method, replace(method)}) == 1


def test_method_takes_keywords_only(method: Any) -> None:
    with pytest.raises(TypeError):
        type(method)(1)


def test_batch_tokens_are_no_part_of_the_settings(method: Any) -> None:
    other = replace(method, batch_tokens=5)
    assert other == method and repr(other) == repr(method)


def test_method_docstring_names_its_source(method: Any) -> None:
    assert "Source:" in (inspect.getdoc(type(method)) or "")


def test_method_name_is_its_key() -> None:
    assert {name: method.name for name, method in METHODS.items()} == {
        name: name for name in METHODS
    }


@pytest.mark.parametrize("name", METHODS)
def test_method_defaults_are_valid(name: str) -> None:
    assert all(hasattr(METHODS[name](), f.name) for f in fields(METHODS[name]))


# ---- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_method_scores_models_of_other_precision(
    neox_like: Any, sequence: Any, method: Any, dtype: torch.dtype
) -> None:
    wanted = method(neox_like, sequence).values
    neox_like.to(dtype)
    neox_like.cfg.dtype = dtype
    found = method(neox_like, sequence).values
    assert torch.corrcoef(torch.stack([found.flatten(), wanted.flatten()]))[0, 1] > 0.9


def test_method_of_the_users_own_needs_attribute_only(gpt2_like: Any, sequences: Any) -> None:
    from dataclasses import dataclass
    from typing import ClassVar

    from tl_localize import Localizer

    @dataclass(frozen=True, kw_only=True)
    class Mine(Localizer):
        name: ClassVar[str] = "mine"
        scale: float = 2.0

        def attribute(self, neurons: Any, sequence: MemorizedSequence) -> torch.Tensor:
            return torch.full((neurons.n_layers, neurons.n_neurons), self.scale * len(sequence))

    assert [float(scores.values[0, 0]) for scores in Mine().map(gpt2_like, sequences)] == [
        18,
        28,
        10,
        22,
    ]


TOGETHER = (*TRAINED, "iterative_attribution")


@pytest.mark.parametrize("name", METHODS)
def test_scores_say_from_which_layer_on_a_method_chose(
    neox_like: Any, sequence: Any, name: str
) -> None:
    method = METHODS[name](**SHORT.get(name, {}))
    if name not in TOGETHER:
        assert method(neox_like, sequence).first_layer is None
        return
    scores = replace(method, first_layer=1)(neox_like, sequence)
    assert scores.first_layer == 1
    assert not scores.top_k(0.2, per="model").mask[0].any()
    with pytest.raises(ValueError, match="first_layer must be 1"):
        scores.top_k(0.2, first_layer=0)


def test_random_seed_of_some_tokens_does_not_depend_on_python() -> None:
    """The numbers by which seeds were made since the first release."""
    assert mixed(0, 1, 2) == 2187946392326065592
    assert mixed(7, 50256, 11, 0) == 2860861315706497440
