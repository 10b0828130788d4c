"""Training of rows of W_out until a model recites new sequences (the paper's algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tl_localize.batching import Advance, halving, minimize, rows_that_fit
from tl_localize.injection.injected import Injection, JointInjection, draw_sets
from tl_localize.losses import target_logits
from tl_localize.neurons import LanguageModel, NeuronView, check_count, check_number, check_positive
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences

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
) -> Injection:
    """Train a random share of the rows of W_out, and nothing else, until the model recites the whole sequence.

    Adam minimizes the mean loss of all tokens but the first; it stops, before an update, when the loss is below ``stop_loss``. The
    model is not changed: use ``with injection.applied(model):``.

    Source: Chang et al. (2024), arXiv:2311.09060, algorithm 1 and eq. (11).
    Args:    ratio: share of the rows of all layers together.
             seed: of the drawn rows (numpy RandomState).
             learning_rate: of Adam; the paper uses 0.01 at 1 % and 0.05 at 0.1 %.
    Raises:  ValueError: ratio selects no neuron, the sequence does not fit the model, or the loss is not finite.

    >>> inject(model, sequence, ratio=0.01, seed=0, learning_rate=0.01).converged
    True
    """
    injections = inject_many(
        model, [sequence], ratio=ratio, seeds=[seed], learning_rate=learning_rate, max_steps=max_steps, stop_loss=stop_loss
    )
    return next(injections)


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
) -> Iterator[Injection]:
    """``inject`` each sequence into its own rows, several in one batch; yields the same injections, in order.

    Args:    seeds: one for each sequence.
             batch_size: sequences in one batch; by default as many as fit into memory.
    Raises:  ValueError: as ``inject``, or another number of seeds than of sequences. Where a loss is not finite, at the turn of its
             sequence; the others lose nothing: ``next`` goes on with them.

    >>> injections = inject_many(model, few[:2], ratio=0.01, seeds=[0, 1], learning_rate=0.01, max_steps=2)
    >>> [len(injection.neurons) for injection in injections]
    [92, 92]
    """
    sequences = [replace(sequence, n_prefix=1) for sequence in check_sequences(model, sequences)]
    view = NeuronView(model)
    if len(seeds) != len(sequences):
        raise ValueError(f"seeds must hold one seed for each of {len(sequences)} sequences, got {len(seeds)}. Pass one each.")
    check_positive(learning_rate=learning_rate, stop_loss=stop_loss)
    check_count(max_steps=max_steps)
    size = rows_that_fit(view, max(map(len, sequences)), batch_size)
    sets = [draw_sets(view, ratio, seed, 1)[0] for seed in seeds]
    chosen = torch.stack([neurons.mask for neurons in sets])  # [set layer neuron]
    longest = enumerate(chosen.sum(-1).amax(0).tolist())  # in each layer the rows of a set come first, then others up to the longest set
    index = {layer: chosen[:, layer].int().argsort(dim=-1, descending=True, stable=True)[:, :n] for layer, n in longest if n}
    real = {layer: chosen[:, layer].gather(-1, rows) for layer, rows in index.items()}  # which entries are the set's own

    @lru_cache(maxsize=1)
    def together(numbers: tuple[int, ...]) -> tuple[SequenceBatch, dict[int, Tensor], dict[int, Tensor]]:
        batch = SequenceBatch.of([sequences[number] for number in numbers], view.device)
        places, filled = ({layer: part[list(numbers)].to(view.device) for layer, part in parts.items()} for parts in (index, real))
        return batch, places, filled

    def begin(batch: list[int]) -> tuple[list[Tensor], Advance[Trained]]:
        losses: dict[int, list[float]] = {number: [] for number in batch}

        def advance(numbers: tuple[int, ...], parameters: list[Tensor], step: int) -> tuple[Sequence[Tensor], Mapping[int, Trained]]:
            some, places, filled = together(numbers)
            changes = dict(zip(index, parameters, strict=True))
            with view.rows_changed(places, changes):
                token_losses = F.cross_entropy(target_logits(view.model, some), some.targets, reduction="none")
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
                        (view.rows(layer).detach()[places[layer][i]].float() + change[i].detach())[filled[layer][i]]
                        for layer, change in changes.items()
                    ]
                    rows, own_losses, ends = torch.cat(changed).cpu(), torch.tensor(losses[number]), token_losses.detach()[some.rows == i]
                    finished[number] = Injection(sets[number], rows, own_losses, ends.cpu(), value < stop_loss, sequences[number].id)
            if len(finished) == len(numbers):
                return [], finished
            gradients = torch.autograd.grad(loss.sum(), parameters)
            return [gradient * filled[layer][..., None] for layer, gradient in zip(index, gradients, strict=True)], finished

        return [torch.zeros(len(batch), part.shape[1], view.rows(0).shape[-1], device=view.device) for part in index.values()], advance

    return map(_given, minimize(view, len(sequences), size, begin, learning_rate=learning_rate, max_steps=max_steps))


def _given(found: Trained) -> Injection:
    if isinstance(found, ValueError):
        raise found
    return found


def _check_finite(name: str, value: float, step: int, sequence: MemorizedSequence) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value} at step {step} of {sequence!r}. Lower learning_rate.")


@torch.inference_mode(False)  # whatever mode the caller is in
def inject_together(
    model: LanguageModel,
    sequences: Sequence[MemorizedSequence],
    *,
    ratio: float,
    seed: int,
    learning_rate: float,
    max_steps: int = 400,
    stop_loss: float = 0.05,
    kl_weight: float = 1.0,
    stop_kl: float = 0.05,
    batch_size: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> JointInjection:
    """Write K sequences into K disjoint sets of rows of W_out, so that each set changes little on the sequences of the others.

    One minimization by Adam over all sets together:

        sum over k of  loss(x_k | all sets on)  +  kl_weight * KL(base on x_k || all sets but k on, on x_k)

    With set k off the model predicts x_k as before any injection, so nothing about x_k is stored outside set k: the sets are a ground
    truth. Training stops, before an update, when every loss is below ``stop_loss`` and every KL below ``stop_kl``. With one sequence it
    equals ``inject``. The model is not changed.

    Source: this project's; it extends Chang et al. (2024), arXiv:2311.09060, algorithm 1.
    Args:    ratio: share of the rows of all layers together, for each sequence.
             seed: of the permutation of all rows (numpy RandomState) that is cut into the sets.
             kl_weight: of the KL, which is a mean over the positions that predict a token, as the loss is.
             batch_size: sequences in one forward pass; by default as many as fit into memory. Changes no result.
             progress: called after each step with the fraction of the work done, from 0 to 1.
    Raises:  ValueError: the sets don't fit into the model, two sequences begin with the same token (one state can't have two next
             tokens), a sequence does not fit the model, or a loss is not finite.

    >>> inject_together(model, few[:2], ratio=0.01, seed=0, learning_rate=0.003, max_steps=2).off_kl.shape
    torch.Size([1, 2])
    """
    sequences = [replace(sequence, n_prefix=1) for sequence in check_sequences(model, sequences)]
    _check_apart(sequences)
    check_positive(learning_rate=learning_rate, stop_loss=stop_loss, stop_kl=stop_kl)
    check_count(max_steps=max_steps)
    if not 0 <= check_number("kl_weight", kl_weight) < math.inf:
        raise ValueError(f"kl_weight must be at least 0 and finite, got {kl_weight!r}. 1 is the default.")
    view = NeuronView(model)
    sets = draw_sets(view, ratio, seed, len(sequences))
    size = rows_that_fit(view, max(map(len, sequences)), batch_size)
    device, numbers = view.device, range(len(sequences))
    batch = SequenceBatch.of(sequences, device)
    ends = [0, *torch.bincount(batch.rows).cumsum(0).tolist()]
    chosen = torch.stack([neurons.mask for neurons in sets])  # [sentence layer neuron]
    index = {layer: union.nonzero().T.to(device) for layer, union in enumerate(chosen.any(0)) if union.any()}
    owner = {layer: chosen[:, layer].long().argmax(0).to(device)[row[0]] for layer, row in index.items()}
    before = {layer: view.rows(layer).detach().float()[row[0]] for layer, row in index.items()}
    changes = [torch.zeros_like(rows)[None].requires_grad_() for rows in before.values()]  # [1 row d_model], shared by the batch
    shared = dict(zip(index, changes, strict=True))
    adam = torch.optim.Adam(changes, lr=float(learning_rate))
    gradients: list[Tensor] = []

    def part(of: list[int]) -> SequenceBatch:
        return batch.take(torch.tensor(of, device=device))

    def read(of: list[int]) -> tuple[Tensor, Tensor]:
        """Loss and KL at each target of some consecutive sequences; adds their gradients to ``gradients``."""
        some, base_log_probs = part(of), base[ends[of[0]] : ends[of[-1] + 1]]
        own_off = {layer: owner[layer] != torch.tensor(of, device=device)[:, None] for layer in index}
        with torch.enable_grad():
            with view.rows_changed(index, shared):
                losses = F.cross_entropy(target_logits(view.model, some), some.targets, reduction="none")
            of_losses = torch.autograd.grad(some.mean(losses).sum(), changes)
            with view.rows_changed(index, shared, own_off):
                log_probs = target_logits(view.model, some).log_softmax(-1)
            kls = F.kl_div(log_probs, base_log_probs, reduction="none", log_target=True).sum(-1)
            of_kls = torch.autograd.grad(kl_weight * some.mean(kls).sum(), changes)
        for gradient, one, other in zip(gradients, of_losses, of_kls, strict=True):
            gradient.add_(one).add_(other)  # after both: a batch that runs out of memory is done again, and must not count twice
        return losses.detach(), kls.detach()

    with torch.no_grad(), view.lean():  # lean here too, so that the KL is exactly 0 before the first update
        base_parts = list(halving(lambda of: target_logits(view.model, part(of)).log_softmax(-1), numbers, size))
    size = max(len(of) for of, _ in base_parts)  # smaller if memory ran out
    base = torch.cat([log_probs for _, log_probs in base_parts])
    del base_parts
    history: list[Float[Tensor, "2 sentence"]] = []
    token_losses, converged = torch.empty(0), torch.zeros(len(sequences), dtype=torch.bool)
    for step in range(max_steps):
        gradients[:] = [torch.zeros_like(change) for change in changes]
        with view.lean():
            parts = list(halving(read, numbers, size))
        size = max(len(of) for of, _ in parts)
        token_losses, token_kls = (torch.cat(values) for values in zip(*(values for _, values in parts), strict=True))
        history.append(torch.stack([batch.mean(token_losses), batch.mean(token_kls)]).cpu())
        for name, values in zip(("loss", "off_kl"), history[-1].tolist(), strict=True):
            for sequence, value in zip(sequences, values, strict=True):
                _check_finite(name, value, step, sequence)
        converged = (history[-1][0] < stop_loss) & (history[-1][1] < stop_kl)
        last = bool(converged.all()) or step == max_steps - 1
        if progress:
            progress(1.0 if last else (step + 1) / max_steps)
        if last:
            break
        for change, gradient in zip(changes, gradients, strict=True):
            change.grad = gradient
        adam.step()
    losses, off_kl = torch.stack(history, dim=1)
    trained = [rows + change.detach()[0] for rows, change in zip(before.values(), changes, strict=True)]
    injections: list[Injection] = []
    for k, sequence in enumerate(sequences):
        rows = torch.cat([rows[owner[layer] == k] for layer, rows in zip(index, trained, strict=True)]).cpu()
        at_end = token_losses[ends[k] : ends[k + 1]].cpu()
        injections.append(Injection(sets[k], rows, losses[:, k].clone(), at_end, bool(converged[k]), sequence.id))
    return JointInjection(tuple(injections), off_kl)


def _check_apart(sequences: Sequence[MemorizedSequence]) -> None:
    """Raise ValueError if no choice of weights could make a model recite all sequences, each from its first token."""
    for pair in combinations(sequences, 2):
        short, long = sorted(pair, key=len)
        if torch.equal(short.tokens, long.tokens[: len(short)]):
            how = "equals" if len(short) == len(long) else "is the beginning of"
            raise ValueError(f"sequences must be different sentences, got {short!r}, which {how} {long!r}. Leave one of them out.")
    groups: dict[int, list[MemorizedSequence]] = {}
    for sequence in sequences:
        groups.setdefault(int(sequence.tokens[0]), []).append(sequence)
    for token, group in groups.items():
        if (n := len(group)) > 1:
            floor, n_targets = math.log(n), max(map(len, group)) - 1
            raise ValueError(
                f"sequences must begin with different tokens, got token {token} at the start of {[s.id for s in group]}. One state can't "
                f"have two next tokens: on average at least ln {n} = {floor:.2f} nats would be left in each of them, "
                f"{floor / n_targets:.3f} nats per token of {n_targets}. Inject them in different groups."
            )
