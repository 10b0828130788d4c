"""Several sequences written into disjoint sets of rows of W_out of one model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor

from tl_localize.batching import Report, halving, rows_that_fit
from tl_localize.injection.injected import FinalLosses, Injection, JointInjection, draw_sets
from tl_localize.injection.training import TrainedRows, check_finite
from tl_localize.losses import target_logits
from tl_localize.neurons import LanguageModel, NeuronView, check_count, check_number, check_positive
from tl_localize.scores import NeuronSet
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences
from tl_localize.units import NEURONS, Units

States = Bool[Tensor, "state set"]


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
    progress: Report | None = None,
    units: Units = NEURONS,
) -> JointInjection:
    """Write K sentences into K disjoint sets of rows of W_out: each set suffices alone for its
    sentence, and changes nothing on the others, whichever sets are on.

    One minimization by Adam over all sets together:

        sum over k of  loss(x_k | set k and some others on)
                       + kl_weight * KL(base on x_k || set k off, some others on, on x_k)

    Rows that are off are the base model's. Which of the other sets are on changes from step to
    step: all, none or one of them, or a random subset. So nothing about x_k is stored
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

    >>> pair = inject_together(model, few[:2], ratio=0.01, seed=0, learning_rate=0.005, max_steps=2)
    >>> [one.off_kl < one.loss for one in pair.final]
    [True, True]
    """
    sequences = [replace(sequence, n_prefix=1) for sequence in check_sequences(model, sequences)]
    _check_first_tokens(sequences)
    check_positive(
        learning_rate=learning_rate, stop_loss=stop_loss, stop_kl=stop_kl, stop_single=stop_single
    )
    check_count(max_steps=max_steps)
    if not 0 <= check_number("kl_weight", kl_weight) < math.inf:
        raise ValueError(
            f"kl_weight must be at least 0 and finite, got {kl_weight!r}. 1 is the default."
        )
    view = NeuronView(model, units)
    n = len(sequences)
    sets = draw_sets(view, ratio, seed, n)
    size = rows_that_fit(view, max(map(len, sequences)), batch_size)
    training = JointTraining(view, sequences, sets, size, learning_rate, float(kl_weight))
    limits = [stop_loss, stop_single if n > 1 else stop_loss, stop_kl, *[stop_single] * (n - 1)]
    generator = torch.Generator().manual_seed(seed)
    return _train(
        training, torch.tensor(limits), generator, max_steps, progress or (lambda fraction: None)
    )


def _check_first_tokens(sequences: Sequence[MemorizedSequence]) -> None:
    """Raise ValueError where two sequences begin alike: no weights could make a model recite both,
    each from its first token.
    """
    ids: dict[int, list[str]] = {}
    for sequence in sequences:
        ids.setdefault(int(sequence.tokens[0]), []).append(sequence.id)
    for token, group in ids.items():
        if len(group) > 1:
            raise ValueError(
                f"sequences must begin with different tokens, got token {token} at the start of "
                f"{group}. One state can't have two next tokens: on average at least ln "
                f"{len(group)} = {math.log(len(group)):.2f} nats would be left in each of them. "
                "Inject them in different groups."
            )


# ---- evaluation


class JointTraining:
    """Sets of rows in training, one for each sentence, and what the model computes while some of
    them are on. The rows of the other sets are the base model's.

    ``on`` [state set] says which sets are on, in a state of the sentence ``which[state]``.
    """

    def __init__(
        self,
        view: NeuronView,
        sequences: Sequence[MemorizedSequence],
        sets: Sequence[NeuronSet],
        size: int,
        learning_rate: float,
        kl_weight: float,
    ) -> None:
        self.view, self.sequences, self.sets = view, sequences, sets
        self.size, self.kl_weight = size, kl_weight
        chosen = torch.stack([view.row_mask(neurons.mask) for neurons in sets])  # [set layer row]
        self.rows = TrainedRows(view, chosen.any(0), learning_rate)
        # the set of each row in training
        self.owner = {
            layer: chosen[:, layer].long().argmax(0).to(view.device)[index[0]]
            for layer, index in self.rows.index.items()
        }
        # log-probabilities of the base model, [target vocab] of each sentence
        self.base: list[Tensor] = []
        none_on = torch.zeros(1, len(sets), dtype=torch.bool)
        with torch.no_grad(), view.lean():
            for which, (_, log_probs) in halving(
                partial(self._log_probs, none_on), range(len(sets)), size
            ):
                self.base += self._by_sentence(log_probs, which)

    def _by_sentence(self, values: Tensor, which: list[int]) -> list[Tensor]:
        return list(values.split([len(self.sequences[k]) - 1 for k in which]))

    def _log_probs(self, on: Tensor, which: list[int]) -> tuple[SequenceBatch, Tensor]:
        """Log-probabilities at the targets of some sentences, [target vocab]."""
        batch = SequenceBatch.of([self.sequences[k] for k in which], self.view.device)
        on = on.to(self.view.device)
        rows_on = {layer: on[:, owner] for layer, owner in self.owner.items()}
        with self.view.rows_changed(self.rows.index, self.rows.changes, rows_on):
            return batch, target_logits(self.view.model, batch).log_softmax(-1)

    def nats(self, which: list[int], on: States, train: bool = False) -> list[Tensor]:
        """Nats at each target of some sentences: the loss where its own set is on, else the KL from
        the base model.

        With ``train``, adds the gradients of the losses and weighted KLs to those of the rows.
        """
        work = partial(self._nats, which, on, train)
        with self.view.lean():
            parts = list(halving(work, range(len(which)), self.size))
        self.size = max(len(batch) for batch, _ in parts)  # smaller if memory ran out
        return [nats for _, found in parts for nats in found]

    def _nats(self, which: list[int], on: States, train: bool, batch: list[int]) -> list[Tensor]:
        which, on = [which[i] for i in batch], on[batch]
        own_on = on[range(len(which)), which].to(self.view.device)
        with torch.set_grad_enabled(train):
            some, log_probs = self._log_probs(on, which)
            losses = F.nll_loss(log_probs, some.targets, reduction="none")
            base = torch.cat([self.base[k] for k in which])
            kls = F.kl_div(log_probs, base, reduction="none", log_target=True).sum(-1)
            nats = torch.where(own_on[some.rows], losses, kls)
            if train:
                weights = torch.where(own_on, 1.0, self.kl_weight)
                self.rows.add_gradients((some.mean(nats) * weights).sum())
        return self._by_sentence(nats.detach().cpu(), which)

    def rows_of(self, k: int) -> Tensor:
        """The rows of one set as they are trained so far, [n d_model], float32 on the CPU."""
        rows = [rows[self.owner[layer] == k] for layer, rows in self.rows.now().items()]
        return torch.cat(rows).cpu()


# ---- schedule


def stop_states(n: int) -> Bool[Tensor, "sentence state set"]:
    """Which sets are on in the states that the stops look at: all sets, the sentence's own alone,
    all others, each other set alone.

    >>> stop_states(2)[0].tolist()
    [[True, True], [True, False], [False, True], [False, True]]
    """
    alone = torch.eye(n, dtype=torch.bool)
    first = torch.cat([torch.ones_like(alone[:1]), alone[:1], ~alone[:1], alone[1:]])
    return torch.stack([first.roll(k, 1) for k in range(n)])


def sets_on(
    step: int, n: int, generator: torch.Generator
) -> tuple[Bool[Tensor, "sentence set"], Bool[Tensor, "sentence set"]]:
    """Which sets are on at a step: for the loss of each sentence, its own set among them, and for
    its KL, its own set off.

    Of four steps, the losses have the own set alone, all sets, the own set alone, and the own with
    a random subset; the KLs have all others, one other, a random subset of the others, and one
    other, each other in turn.

    >>> sets_on(0, 2, torch.Generator())[0].tolist()  # each set alone
    [[True, False], [False, True]]
    """
    own = torch.eye(n, dtype=torch.bool)
    some = torch.rand(2, n, n, generator=generator) < 0.5
    one_other = own.roll(1 + step // 2 % max(1, n - 1), 1) & ~own
    of_losses = (own, torch.ones_like(own), own, some[0] | own)
    of_kls = (~own, one_other, some[1] & ~own, one_other)
    return of_losses[step % 4], of_kls[step % 4]


# ---- training


def _train(
    training: JointTraining,
    limits: Tensor,
    generator: torch.Generator,
    max_steps: int,
    report: Report,
) -> JointInjection:
    """Train until every sentence is below the limits in all states of the stops."""
    n = len(training.sequences)
    everyone, states = list(range(n)), stop_states(n)
    # what each sentence had in each of these states when training last met it
    seen = torch.full(states.shape[:2], math.inf)
    history: list[Tensor] = []  # [2 sentence] of each step
    at_end: list[Tensor] = []
    for step in range(max_steps):
        on = torch.stack(sets_on(step, n, generator))  # [2 sentence set]
        training.rows.adam.zero_grad()
        nats = training.nats(everyone * 2, on.flatten(0, 1), train=True)
        means = torch.stack([one.mean() for one in nats]).view(2, n)
        for name, values in zip(("loss", "KL"), means.tolist(), strict=True):
            for sequence, value in zip(training.sequences, values, strict=True):
                check_finite(name, value, step, sequence)
        history.append(means)
        for mean, state in zip(means, on, strict=True):
            met = (states == state[:, None]).all(-1)
            seen = torch.where(met, mean[:, None], seen)
        last = step == max_steps - 1
        if last or bool((seen < limits).all()):
            at_end = training.nats([k for k in everyone for _ in limits], states.flatten(0, 1))
            seen = torch.stack([one.mean() for one in at_end]).view(n, -1)
            last = last or bool((seen < limits).all())
        report(1.0 if last else (step + 1) / max_steps)
        if last:
            break
        training.rows.adam.step()
    history[-1] = seen[:, [0, 2]].T
    losses, kls = torch.stack(history, dim=1)
    injections, final = list[Injection](), list[FinalLosses]()
    for k, sequence in enumerate(training.sequences):
        converged, token_losses = bool((seen[k] < limits).all()), at_end[k * len(limits)]
        about = losses[:, k].clone(), token_losses, converged, sequence.id
        injections.append(Injection(training.sets[k], training.rows_of(k), *about))
        loss, alone_loss, off_kl, *other_kls = seen[k].tolist()
        final.append(FinalLosses(loss, alone_loss, off_kl, max(other_kls, default=off_kl)))
    return JointInjection(tuple(injections), kls, tuple(final))
