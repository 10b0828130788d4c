"""Training of rows of W_out until a model recites new sequences (the paper's algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from tl_localize.batching import Advance, halving, minimize, rows_that_fit
from tl_localize.injection.injected import Injection, JointInjection, draw_sets
from tl_localize.losses import target_logits
from tl_localize.neurons import LanguageModel, NeuronView, check_count, check_number, check_positive
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences
from tl_localize.units import NEURONS, Units

Trained = Injection | ValueError  # or why there is none


def inject(
    model: LanguageModel,
    sequence: MemorizedSequence,
    *,
    ratio: float,
    seed: int,
    learning_rate: float,
    max_steps: int = 200,
    stop_loss: float = 0.05,
    units: Units = NEURONS,
) -> Injection:
    """Train a random share of the rows of W_out, and nothing else, until the model recites the
    whole sequence.

    Adam minimizes the mean loss of all tokens but the first; it stops, before an update, when the
    loss is below ``stop_loss``. The model is not changed: use ``with injection.applied(model):``.

    Source: Chang et al. (2024), arXiv:2311.09060, algorithm 1 and eq. (11).

    Args:
        ratio: share of the rows of all layers together.
        seed: of the drawn rows (numpy RandomState).
        learning_rate: of Adam; the paper uses 0.01 at 1 % and 0.05 at 0.1 %.
        units: whose rows are trained: of ``AttentionHeads()`` a share of all heads, with all rows
            of W_O that belong to them.

    Raises:
        ValueError: ratio selects no neuron, the sequence does not fit the model, or the loss is not
            finite.

    >>> inject(model, sequence, ratio=0.01, seed=0, learning_rate=0.01).converged
    True
    """
    how: dict[str, Any] = {
        "learning_rate": learning_rate,
        "max_steps": max_steps,
        "stop_loss": stop_loss,
    }
    return next(inject_many(model, [sequence], ratio=ratio, seeds=[seed], **how, units=units))


def inject_many(
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    *,
    ratio: float,
    seeds: Sequence[int],
    learning_rate: float,
    max_steps: int = 200,
    stop_loss: float = 0.05,
    batch_size: int | None = None,
    units: Units = NEURONS,
) -> Iterator[Injection]:
    """``inject`` each sequence into its own rows, several in one batch; yields the same injections,
    in order.

    Args:
        seeds: one for each sequence.
        batch_size: sequences in one batch; by default as many as fit into memory.

    Raises:
        ValueError: as ``inject``, or another number of seeds than of sequences. Where a loss is not
            finite, at the turn of its sequence; the others lose nothing: ``next`` goes on with
            them.

    >>> injections = inject_many(model, few[:2], ratio=0.01, seeds=[0, 1], learning_rate=0.01, max_steps=2)
    >>> [len(injection.neurons) for injection in injections]
    [92, 92]
    """
    sequences = [replace(sequence, n_prefix=1) for sequence in check_sequences(model, sequences)]
    view = NeuronView(model, units)
    if len(seeds) != len(sequences):
        raise ValueError(
            f"seeds must hold one seed for each of {len(sequences)} sequences, got {len(seeds)}. "
            "Pass one each."
        )
    check_positive(learning_rate=learning_rate, stop_loss=stop_loss)
    check_count(max_steps=max_steps)
    size = rows_that_fit(view, max(map(len, sequences)), batch_size)
    sets = [draw_sets(view, ratio, seed, 1)[0] for seed in seeds]
    chosen = torch.stack([view.row_mask(neurons.mask) for neurons in sets])  # [set layer row]
    # in each layer the rows of a set come first, then others up to the longest set
    longest = enumerate(chosen.sum(-1).amax(0).tolist())
    index = {
        layer: chosen[:, layer].int().argsort(dim=-1, descending=True, stable=True)[:, :n]
        for layer, n in longest
        if n
    }
    # which entries are the set's own
    real = {layer: chosen[:, layer].gather(-1, rows) for layer, rows in index.items()}

    @lru_cache(maxsize=1)
    def together(
        numbers: tuple[int, ...],
    ) -> tuple[SequenceBatch, dict[int, Tensor], dict[int, Tensor]]:
        batch = SequenceBatch.of([sequences[number] for number in numbers], view.device)
        places, filled = (
            {layer: part[list(numbers)].to(view.device) for layer, part in parts.items()}
            for parts in (index, real)
        )
        return batch, places, filled

    def begin(batch: list[int]) -> tuple[list[Tensor], Advance[Trained]]:
        losses: dict[int, list[float]] = {number: [] for number in batch}

        def advance(
            numbers: tuple[int, ...], parameters: list[Tensor], step: int
        ) -> tuple[Sequence[Tensor], Mapping[int, Trained]]:
            some, places, filled = together(numbers)
            changes = dict(zip(index, parameters, strict=True))
            with view.rows_changed(places, changes):
                token_losses = F.cross_entropy(
                    target_logits(view.model, some), some.targets, reduction="none"
                )
            loss = some.mean(token_losses)
            finished: dict[int, Trained] = {}
            for i, (number, value) in enumerate(zip(numbers, loss.tolist(), strict=True)):
                try:
                    _check_finite("loss", value, step, sequences[number])
                except ValueError as error:
                    finished[number] = error
                    continue
                losses[number].append(value)
                if value < stop_loss or step == max_steps - 1:
                    changed = [
                        (
                            view.flat_rows(layer).detach()[places[layer][i]].float()
                            + change[i].detach()
                        )[filled[layer][i]]
                        for layer, change in changes.items()
                    ]
                    rows, own_losses, ends = (
                        torch.cat(changed).cpu(),
                        torch.tensor(losses[number]),
                        token_losses.detach()[some.rows == i],
                    )
                    finished[number] = Injection(
                        sets[number],
                        rows,
                        own_losses,
                        ends.cpu(),
                        value < stop_loss,
                        sequences[number].id,
                    )
            if len(finished) == len(numbers):
                return [], finished
            gradients = torch.autograd.grad(loss.sum(), parameters)
            return [
                gradient * filled[layer][..., None]
                for layer, gradient in zip(index, gradients, strict=True)
            ], finished

        return [
            torch.zeros(len(batch), part.shape[1], view.flat_rows(0).shape[-1], device=view.device)
            for part in index.values()
        ], advance

    return map(
        _given,
        minimize(
            view, len(sequences), size, begin, learning_rate=learning_rate, max_steps=max_steps
        ),
    )


def _given(found: Trained) -> Injection:
    if isinstance(found, ValueError):
        raise found
    return found


def _check_finite(name: str, value: float, step: int, sequence: MemorizedSequence) -> None:
    if not math.isfinite(value):
        raise ValueError(
            f"{name} must be finite, got {value} at step {step} of {sequence!r}. Lower "
            "learning_rate."
        )


@torch.inference_mode(False)  # whatever mode the caller is in
def inject_together(
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    *,
    ratio: float,
    seed: int,
    learning_rate: float,
    max_steps: int = 1000,
    stop_loss: float = 0.05,
    kl_weight: float = 1.0,
    stop_kl: float = 0.05,
    stop_single: float = 0.08,
    batch_size: int | None = None,
    progress: Callable[[float], None] | None = None,
    units: Units = NEURONS,
) -> JointInjection:
    """Write K sentences into K disjoint sets of rows of W_out: each set suffices alone for its
    sentence, and is silent in every company.

    One minimization by Adam over all sets together:

        sum over k of  loss(x_k | set k and some others on)  +  kl_weight * KL(base on x_k || set k off, some others on, on x_k)

    Rows that are off are the base model's. The others that are on change from step to step
    (``companies``): all, none or one of them, or a random subset. So nothing about x_k is stored
    outside set k, and nothing else is needed: the sets are a ground truth. Training stops, before
    an update, when for every sentence the loss with all sets on is below ``stop_loss``, the KL with
    all others on below ``stop_kl``, and the loss with its own set alone and the KL with each other
    set alone below ``stop_single``. With one sequence it equals ``inject``. The model is not
    changed.

    Source: this project's; it extends Chang et al. (2024), arXiv:2311.09060, algorithm 1.

    Args:
        ratio: share of the rows of all layers together, for each sequence.
        seed: of the permutation of all rows (numpy RandomState) that is cut into the sets, and of
            the random subsets.
        kl_weight: of the KL, which is a mean over the positions that predict a token, as the loss
            is.
        batch_size: sequences in one forward pass; by default as many as fit into memory. Changes no
            result.
        units: whose rows are trained, as in ``inject``.
        progress: called after each step with the fraction of the work done, from 0 to 1.

    Raises:
        ValueError: the sets don't fit into the model, two sequences begin with the same token (one
            state can't have two next tokens), a sequence does not fit the model, or a loss is not
            finite.

    >>> inject_together(model, few[:2], ratio=0.01, seed=0, learning_rate=0.005, max_steps=2).ends.shape
    torch.Size([2, 4])
    """
    sequences = [replace(sequence, n_prefix=1) for sequence in check_sequences(model, sequences)]
    _check_apart(sequences)
    check_positive(
        learning_rate=learning_rate, stop_loss=stop_loss, stop_kl=stop_kl, stop_single=stop_single
    )
    check_count(max_steps=max_steps)
    if not 0 <= check_number("kl_weight", kl_weight) < math.inf:
        raise ValueError(
            f"kl_weight must be at least 0 and finite, got {kl_weight!r}. 1 is the default."
        )
    view = NeuronView(model, units)
    sets = draw_sets(view, ratio, seed, n := len(sequences))
    size = rows_that_fit(view, max(map(len, sequences)), batch_size)
    device = view.device
    chosen = torch.stack([view.row_mask(neurons.mask) for neurons in sets])  # [sentence layer row]
    index = {
        layer: union.nonzero().T.to(device)
        for layer, union in enumerate(chosen.any(0))
        if union.any()
    }
    owner = {
        layer: chosen[:, layer].long().argmax(0).to(device)[row[0]] for layer, row in index.items()
    }
    before = {layer: view.flat_rows(layer).detach().float()[row[0]] for layer, row in index.items()}
    # [1 row d_model], shared by the batch
    changes = [torch.zeros_like(rows)[None].requires_grad_() for rows in before.values()]
    shared = dict(zip(index, changes, strict=True))
    adam = torch.optim.Adam(changes, lr=float(learning_rate))
    generator = torch.Generator().manual_seed(seed)

    def predict(
        which: list[int], states: Bool[Tensor, "state set"]
    ) -> tuple[SequenceBatch, Float[Tensor, "target vocab"]]:
        """Log-probabilities at the targets of these sentences, each while some sets are on."""
        some = SequenceBatch.of([sequences[k] for k in which], device)
        with view.rows_changed(
            index, shared, {layer: states.to(device)[:, owner[layer]] for layer in index}
        ):
            return some, target_logits(view.model, some).log_softmax(-1)

    def read(
        which: list[int], states: Bool[Tensor, "state set"], gradients: Sequence[Tensor] = ()
    ) -> list[Float[Tensor, " target"]]:
        """Nats at each target of these sentences, the loss where the own set is on, else the KL;
        adds to the gradients.
        """
        nonlocal size
        own = states[range(len(which)), which]

        def values(batch: list[int]) -> list[Tensor]:
            with torch.set_grad_enabled(bool(gradients)):
                some, log_probs = predict([which[i] for i in batch], states[batch])
                losses = F.nll_loss(log_probs, some.targets, reduction="none")
                kls = F.kl_div(
                    log_probs,
                    torch.cat([base[which[i]] for i in batch]),
                    reduction="none",
                    log_target=True,
                ).sum(-1)
                recited = own[batch].to(device)
                nats = torch.where(recited[some.rows], losses, kls)
            if gradients:
                total = (some.mean(nats) * torch.where(recited, 1.0, float(kl_weight))).sum()
                for gradient, part in zip(
                    gradients, torch.autograd.grad(total, changes), strict=True
                ):
                    gradient.add_(part)
            return [nats.detach()[some.rows == row].cpu() for row in range(len(batch))]

        with view.lean():
            parts = list(halving(values, range(len(which)), size))
        size = max(len(batch) for batch, _ in parts)  # smaller if memory ran out
        return [nats for _, part in parts for nats in part]

    everyone = list(range(n))
    with torch.no_grad(), view.lean():
        parts = halving(
            lambda batch: predict(batch, torch.zeros(len(batch), n, dtype=torch.bool)),
            everyone,
            size,
        )
        base = [
            log_probs[some.rows == row]
            for _, (some, log_probs) in parts
            for row in range(len(some))
        ]
    named = torch.stack([named_states(n).roll(k, 1) for k in everyone])  # [sentence state set]
    limits = torch.tensor(
        [stop_loss, stop_single if n > 1 else stop_loss, stop_kl, *[stop_single] * (n - 1)]
    )
    # what each sentence had in each named state when training last met it
    seen = torch.full(named.shape[:2], math.inf)
    history: list[Float[Tensor, "2 sentence"]] = []
    at_end: list[Tensor] = []
    for step in range(max_steps):
        gradients = [torch.zeros_like(change) for change in changes]
        states = torch.stack(companies(step, n, generator))  # [2 sentence set]
        means = torch.stack(
            [nats.mean() for nats in read([*everyone, *everyone], states.flatten(0, 1), gradients)]
        ).view(2, n)
        for name, values in zip(("loss", "KL"), means.tolist(), strict=True):
            for sequence, value in zip(sequences, values, strict=True):
                _check_finite(name, value, step, sequence)
        history.append(means)
        for mean, state in zip(means, states, strict=True):
            seen = torch.where((named == state[:, None]).all(-1), mean[:, None], seen)
        if (last := step == max_steps - 1) or (seen < limits).all():
            at_end = read([k for k in everyone for _ in limits], named.flatten(0, 1))
            seen = torch.stack([nats.mean() for nats in at_end]).view(n, -1)
            last = last or bool((seen < limits).all())
        if progress:
            progress(1.0 if last else (step + 1) / max_steps)
        if last:
            break
        for change, gradient in zip(changes, gradients, strict=True):
            change.grad = gradient
        adam.step()
    ends = torch.cat(
        [seen[:, :3], seen[:, 3:].amax(1, keepdim=True) if n > 1 else seen[:, 2:]], dim=1
    )
    history[-1] = ends[:, [0, 2]].T
    losses, kls = torch.stack(history, dim=1)
    converged = (seen < limits).all(1).tolist()
    trained = [
        rows + change.detach()[0] for rows, change in zip(before.values(), changes, strict=True)
    ]
    injections: list[Injection] = []
    for k, sequence in enumerate(sequences):
        rows = torch.cat(
            [rows[owner[layer] == k] for layer, rows in zip(index, trained, strict=True)]
        ).cpu()
        injections.append(
            Injection(
                sets[k],
                rows,
                losses[:, k].clone(),
                at_end[k * len(limits)],
                converged[k],
                sequence.id,
            )
        )
    return JointInjection(tuple(injections), kls, ends)


def named_states(n: int) -> Bool[Tensor, "state set"]:
    """Which sets are on in the states of the stops, from the first sentence's view: all, its own
    alone, all others, each other alone.

    >>> named_states(2).tolist()
    [[True, True], [True, False], [False, True], [False, True]]
    """
    alone = torch.eye(n, dtype=torch.bool)
    return torch.cat([torch.ones_like(alone[:1]), alone[:1], ~alone[:1], alone[1:]])


def companies(
    step: int, n: int, generator: torch.Generator
) -> tuple[Bool[Tensor, "sentence set"], Bool[Tensor, "sentence set"]]:
    """Which sets are on at a step: for the loss of each sentence, its own set among them, and for
    its KL, its own set off.

    >>> companies(0, 2, torch.Generator())[0].tolist()  # each set alone
    [[True, False], [False, True]]
    """
    own = torch.eye(n, dtype=torch.bool)
    some = torch.rand(2, n, n, generator=generator) < 0.5
    one = own.roll(1 + step // 2 % max(1, n - 1), 1) & ~own
    recited = (own, torch.ones_like(own), own, some[0] | own)[step % 4]
    silent = (~own, one, some[1] & ~own, one)[step % 4]
    return recited, silent


def _check_apart(sequences: Sequence[MemorizedSequence]) -> None:
    """Raise ValueError if no choice of weights could make a model recite all sequences, each from
    its first token.
    """
    for pair in combinations(sequences, 2):
        short, long = sorted(pair, key=len)
        if torch.equal(short.tokens, long.tokens[: len(short)]):
            how = "equals" if len(short) == len(long) else "is the beginning of"
            raise ValueError(
                f"sequences must be different sentences, got {short!r}, which {how} {long!r}. "
                "Leave one of them out."
            )
    groups: dict[int, list[MemorizedSequence]] = {}
    for sequence in sequences:
        groups.setdefault(int(sequence.tokens[0]), []).append(sequence)
    for token, group in groups.items():
        if (n := len(group)) > 1:
            floor, n_targets = math.log(n), max(map(len, group)) - 1
            raise ValueError(
                f"sequences must begin with different tokens, got token {token} at the start of "
                f"{[s.id for s in group]}. One state can't "
                f"have two next tokens: on average at least ln {n} = {floor:.2f} nats would be "
                "left in each of them, "
                f"{floor / n_targets:.3f} nats per token of {n_targets}. Inject them in different "
                "groups."
            )
