"""Training of rows of W_out until a model recites new sequences: one sequence (algorithm 1 of the
paper), or several in disjoint sets of rows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from tl_localize.checks import check_count, check_positive
from tl_localize.files import Saved, digest
from tl_localize.injection.injected import Injection, JointInjection, draw_sets
from tl_localize.metrics import batch_loss, target_logits
from tl_localize.model.environment import fingerprint
from tl_localize.model.memory import (
    TextReport,
    as_text_report,
    part_at,
    rows_that_fit,
    work_in_batches,
)
from tl_localize.model.neurons import LanguageModel, NeuronView
from tl_localize.scores import NeuronSet
from tl_localize.sequences import MemorizedSequence, SequenceBatch, check_sequences
from tl_localize.units import NEURONS, Units

States = Bool[Tensor, "state sentence set"]
STOP_KL = 0.05  # nats, with all other sets on
STOP_SINGLE = 0.08  # nats, of the loss with the own set alone and of the KL with one other alone
KEPT_EVERY = 20  # steps of a joint training


# ---- one sequence


class TrainedRows:
    """Rows of W_out in training: the model keeps its own, and changes are added in each pass.

    ``index`` [1 row], ``before`` [row d_model] and ``changes`` [1 row d_model] are by layer, of the
    layers that have rows in training.
    """

    def __init__(
        self, view: NeuronView, rows: Bool[Tensor, "layer row"], learning_rate: float
    ) -> None:
        self.index: dict[int, Tensor] = {}
        self.before: dict[int, Tensor] = {}
        self.changes: dict[int, Tensor] = {}
        for layer in rows.any(1).nonzero().flatten().tolist():
            index = rows[layer].nonzero().T.to(view.device)
            before = view.flat_rows(layer).detach()[index[0]].float()
            self.index[layer] = index
            self.before[layer] = before
            self.changes[layer] = torch.zeros_like(before)[None].requires_grad_()
        self.adam = torch.optim.Adam(list(self.changes.values()), lr=float(learning_rate))

    def add_gradients(self, total: Tensor) -> None:
        """Add the gradients of a number to those of the changes, or none if memory runs out."""
        changes = list(self.changes.values())
        pairs = zip(changes, torch.autograd.grad(total, changes), strict=True)
        sums = [new if change.grad is None else change.grad + new for change, new in pairs]
        for change, gradient in zip(changes, sums, strict=True):
            change.grad = gradient

    def go_on_from(self, state: "TrainingState") -> None:
        """Take the changes and Adam's moments from an earlier training."""
        parts = zip(self.changes.values(), state.changes, state.moments, strict=True)
        with torch.no_grad():
            for change, value, moments in parts:
                change.copy_(value)
                first, second = moments.to(change.device).clone()
                self.adam.state[change] = {
                    "step": torch.tensor(float(len(state.losses))),
                    "exp_avg": first,
                    "exp_avg_sq": second,
                }

    def moments(self) -> list[Tensor]:
        """Adam's two moments by layer, [moment 1 row d_model] on the CPU."""
        states = [self.adam.state[change] for change in self.changes.values()]
        return [torch.stack([state["exp_avg"], state["exp_avg_sq"]]).cpu() for state in states]

    def now(self) -> dict[int, Tensor]:
        """The rows as they are trained so far, by layer, [row d_model]."""
        return {
            layer: before + self.changes[layer].detach()[0] for layer, before in self.before.items()
        }


@torch.inference_mode(False)  # whatever mode the caller is in
@torch.enable_grad()
def inject(
    model: LanguageModel,
    sequence: MemorizedSequence,
    *,
    ratio: float,
    seed: int,
    learning_rate: float,
    max_steps: int = 200,
    stop_loss: float = 0.05,
    progress: Callable[..., None] | None = None,
    units: Units = NEURONS,
) -> Injection:
    """Train a random share of the rows of W_out, and nothing else, until the model recites the
    whole sequence.

    Adam minimizes the mean loss of all tokens but the first of the text; it stops, before an
    update, when the loss is below ``stop_loss``. The model is not changed: use
    ``with injection.applied(model):``.

    Source: Chang et al. (2024), arXiv:2311.09060, algorithm 1 and eq. (13). Differs: the authors
    train in training mode, with dropout where a model has it; this trains the model as it is.

    Args:
        ratio: share of the rows of all layers together.
        seed: of the drawn rows (numpy RandomState).
        learning_rate: of Adam; the paper uses 0.01 at 1 % and 0.05 at 0.1 %.
        progress: called after each step with the fraction of the work done, from 0 to 1, and, where
            it takes two arguments, with a text such as ``"step 40, loss 0.31"``.
        units: whose rows are trained: of ``AttentionHeads()`` a share of all heads, with all rows
            of W_O that belong to them.

    Raises:
        ValueError: ratio selects no neuron, the sequence does not fit the model, or the loss is not
            finite.

    >>> inject(model, sequence, ratio=0.01, seed=0, learning_rate=0.01).converged
    True
    """
    sequence = check_sequences(model, [sequence])[0].whole
    check_positive(learning_rate=learning_rate, stop_loss=stop_loss)
    check_count(max_steps=max_steps)
    view = NeuronView(model, units)
    neurons = draw_sets(view, ratio, seed, 1)[0]
    rows = TrainedRows(view, view.row_mask(neurons.mask), learning_rate)
    batch = SequenceBatch.of([sequence], view.device)
    losses: list[float] = []
    report = as_text_report(progress)
    with view.lean():
        for step in range(max_steps):
            with view.rows_changed(rows.index, rows.changes):
                loss = batch_loss(view.model, batch).sum()
            losses.append(float(loss.detach()))
            check_finite(losses[-1], step, sequence)
            done = losses[-1] < stop_loss or step == max_steps - 1
            report(1.0 if done else (step + 1) / max_steps, step_text(step, losses[-1:]))
            if done:
                break
            rows.adam.zero_grad()
            rows.add_gradients(loss)
            rows.adam.step()
    return Injection(
        neurons,
        torch.cat(list(rows.now().values())).cpu(),
        torch.tensor(losses),
        bool(losses[-1] < stop_loss),
        sequence.id,
    )


def step_text(step: int, losses: Sequence[float]) -> str:
    """What a step of training tells: its number, from 1, and the largest loss.

    >>> step_text(39, [0.31])
    'step 40, loss 0.31'
    """
    which = "largest loss" if len(losses) > 1 else "loss"
    return f"step {step + 1}, {which} {max(losses):.2f}"


def check_finite(loss: float, step: int, sequence: MemorizedSequence) -> None:
    """Raise ValueError where a loss of training is not finite."""
    if not math.isfinite(loss):
        raise ValueError(
            f"loss must be finite, got {loss} at step {step} of {sequence!r}. Lower learning_rate."
        )


# ---- several sequences


@dataclass(frozen=True, eq=False)
class TrainingState(Saved):
    """A joint injection that is not finished, from which ``inject_together`` goes on bit for bit.

    Args:
        about: a hash of the model, the rows, the sequences, and how they are trained.
        changes: of the rows so far, by layer [1 row d_model], float32 on the CPU, as all tensors.
            A layer has a number of rows of its own (jaxtyping's ``_row`` is any number).
        moments: of Adam, by layer [moment 1 row d_model].
        losses: [step sentence] before each update so far.
        seen: [state sentence] what was last seen in the states that the stops look at.

    >>> states = []
    >>> how = {"ratio": 0.01, "seed": 0, "learning_rate": 0.005, "stop_loss": 1e-9}
    >>> whole = inject_together(model, few[:2], **how, max_steps=21, keep=states.append)
    >>> again = inject_together(model, few[:2], **how, max_steps=21, resume=states[0])
    >>> len(states[0].losses), bool((again.losses == whole.losses).all())
    (20, True)
    """

    about: str
    changes: list[Float[Tensor, "1 _row d_model"]]
    moments: list[Float[Tensor, "moment 1 _row d_model"]]
    losses: Float[Tensor, "step sentence"]
    seen: Float[Tensor, "state sentence"]


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
    batch_size: int | None = None,
    progress: Callable[..., None] | None = None,
    units: Units = NEURONS,
    resume: TrainingState | None = None,
    keep: Callable[[TrainingState], None] | None = None,
) -> JointInjection:
    """Write K sentences into K disjoint sets of rows of W_out: each set suffices alone for its
    sentence, and changes nothing on the others, whichever sets are on.

    One minimization by Adam over all sets together:

        sum over k of  loss(x_k | set k and some others on)
                       + KL(base on x_k || set k off, some others on, on x_k)

    Rows that are off are the base model's. Which of the other sets are on changes from step to
    step: all, none or one of them, or a random subset. So nothing about x_k is stored
    outside set k, and nothing else is needed: the sets are a ground truth. Training stops, before
    an update, when for every sentence the loss with all sets on is below ``stop_loss``, the KL with
    all others on below 0.05 nats, and the loss with its own set alone and the KL with each other
    set alone below 0.08. KL and loss are means over the positions that predict a token. With one
    sequence it equals ``inject``. The model is not changed.

    Source: ours. It extends Chang et al. (2024), arXiv:2311.09060, algorithm 1.

    Args:
        ratio: share of the rows of all layers together, for each sequence.
        seed: of the permutation of all rows (numpy RandomState) that is cut into the sets, and of
            the random subsets.
        batch_size: sequences in one forward pass; by default as many as fit into memory. Changes
            results by rounding alone.
        units: whose rows are trained, as in ``inject``.
        progress: called after each step with the fraction of the work done, from 0 to 1, and, where
            it takes two arguments, with a text such as ``"step 40, largest loss 0.31"``.
        resume: what ``keep`` was given of the same training, which may have had other limits of
            steps and losses.
        keep: called every 20 steps with what the training can go on from.

    Raises:
        ValueError: ``resume`` is of another training, the sets don't fit into the model, two
            sequences begin with the same token (one state can't have two next tokens), a sequence
            does not fit the model, or a loss is not finite.

    >>> pair = inject_together(model, few[:2], ratio=0.01, seed=0, learning_rate=0.005, max_steps=2)
    >>> pair.losses.shape
    torch.Size([2, 2])
    """
    sequences = [sequence.whole for sequence in check_sequences(model, sequences)]
    first = [int(sequence.prefix[-1]) for sequence in sequences]
    if len(set(first)) < len(first):
        raise ValueError(
            f"sequences must begin with different tokens, got the first tokens {first}. No weights "
            "give one state two next tokens: inject such sequences in different groups."
        )
    check_positive(learning_rate=learning_rate, stop_loss=stop_loss)
    check_count(max_steps=max_steps)
    view = NeuronView(model, units)
    n = len(sequences)
    sets = draw_sets(view, ratio, seed, n)
    size = rows_that_fit(view, max(map(len, sequences)), batch_size)
    training = JointTraining(view, sequences, sets, size, learning_rate, seed)
    # of the states of ``stop_states``; with one sentence, alone is all
    single = STOP_SINGLE if n > 1 else stop_loss
    limits = torch.tensor([[stop_loss], [single], [STOP_KL], *[[STOP_SINGLE]] * (n - 1)])
    if resume is not None:
        check_resume(resume, training.about, max_steps)
    losses, ends = _train(training, limits, max_steps, as_text_report(progress), resume, keep)
    converged = (ends < limits).all(0).tolist()
    injections: list[Injection] = []
    for k, sequence in enumerate(sequences):
        about = losses[:, k].clone(), converged[k], sequence.id
        injections.append(Injection(sets[k], training.rows_of(k), *about))
    return JointInjection(injections)


def check_resume(resume: TrainingState, about: str, max_steps: int) -> None:
    """Raise TypeError or ValueError where a training can't go on from a state."""
    if not isinstance(resume, TrainingState):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"resume must be a TrainingState, got {type(resume).__name__}. Give what ``keep`` "
            "was given."
        )
    if resume.about != about:
        raise ValueError(
            "resume must be of the same model, sequences, ratio, seed, learning_rate and units, "
            "got a state of another training. Leave it out to start anew."
        )
    if len(resume.losses) >= max_steps:
        raise ValueError(
            f"max_steps must be more than the {len(resume.losses)} of resume, got {max_steps}. "
            "Raise it, or leave resume out."
        )


# ---- evaluation


@dataclass(eq=False)
class JointTraining:
    """Sets of rows in training, one for each sentence, and what the model computes while some of
    them are on. The rows of the other sets are the base model's.

    ``on`` [state sentence set] says which sets are on, in some states of each sentence. A case is
    one sentence in one state; all cases have numbers, state by state.
    """

    view: NeuronView
    sequences: Sequence[MemorizedSequence]
    sets: Sequence[NeuronSet]
    size: int  # cases in a forward pass
    learning_rate: float
    seed: int  # of the states that are drawn

    def __post_init__(self) -> None:
        # [set layer row]
        chosen = torch.stack([self.view.row_mask(neurons.mask) for neurons in self.sets])
        self.rows = TrainedRows(self.view, chosen.any(0), self.learning_rate)
        # the set of each row in training
        self.owner = {
            layer: chosen[:, layer].long().argmax(0).to(self.view.device)[index[0]]
            for layer, index in self.rows.index.items()
        }
        self.targets = [sequence.suffix.to(self.view.device) for sequence in self.sequences]
        self.batches: dict[tuple[int, ...], SequenceBatch] = {}
        # log-probabilities of the base model, [target vocab] of each sentence
        self.base: list[Tensor] = []
        n = len(self.sets)
        none_on = torch.zeros(1, n, n, dtype=torch.bool, device=self.view.device)
        with torch.no_grad(), self.view.lean():
            for _, found in work_in_batches(partial(self._log_probs, none_on), range(n), self.size):
                self.base += found

    def _log_probs(self, on: States, cases: list[int]) -> list[Tensor]:
        """Log-probabilities at the targets, [target vocab] of each case."""
        sentences = tuple(case % len(self.sets) for case in cases)
        if sentences not in self.batches:
            some = [self.sequences[k] for k in sentences]
            self.batches[sentences] = SequenceBatch.of(some, self.view.device)
        batch = self.batches[sentences]
        on_in_case = part_at(on.flatten(0, 1), cases)
        rows_on = {layer: on_in_case[:, owner] for layer, owner in self.owner.items()}
        with self.view.rows_changed(self.rows.index, self.rows.changes, rows_on):
            log_probs = target_logits(self.view.model, batch).log_softmax(-1)
        return list(log_probs.split([len(self.targets[k]) for k in sentences]))

    def means(self, on: States, on_device: States, train: bool = False) -> Tensor:
        """Mean nats over the targets of each case, [state sentence] on the CPU: the loss where its
        own set is on, else the KL from the base model.

        With ``train``, adds their gradients to those of the rows.
        """
        found: list[Tensor] = []
        largest = 0
        with self.view.lean(), torch.set_grad_enabled(train):
            work = partial(self._means, on, on_device, train)
            for cases, nats in work_in_batches(work, range(on[..., 0].numel()), self.size):
                found.append(nats)
                largest = max(largest, len(cases))
        self.size = largest  # smaller if memory ran out
        return torch.cat(found).cpu().view(on.shape[:2])

    def _means(self, on: States, on_device: States, train: bool, cases: list[int]) -> Tensor:
        found: list[Tensor] = []
        for case, reached in zip(cases, self._log_probs(on_device, cases), strict=True):
            state, k = divmod(case, len(self.sets))
            if on[state, k, k]:
                nats = F.nll_loss(reached, self.targets[k], reduction="none")
            else:
                nats = F.kl_div(reached, self.base[k], reduction="none", log_target=True).sum(-1)
            found.append(nats.mean())
        means = torch.stack(found)
        if train:
            self.rows.add_gradients(means.sum())
        return means.detach()

    @cached_property
    def about(self) -> str:
        """A hash of what is trained, and how."""
        how: dict[str, Any] = {"seed": self.seed, "learning_rate": float(self.learning_rate)}
        how["sequences"] = [sequence.fingerprint for sequence in self.sequences]
        how["model"] = fingerprint(self.view.model)
        return digest(how, torch.stack([neurons.mask for neurons in self.sets]))

    def rows_of(self, k: int) -> Tensor:
        """The rows of one set as they are trained so far, [n d_model], float32 on the CPU."""
        rows = [rows[self.owner[layer] == k] for layer, rows in self.rows.now().items()]
        return torch.cat(rows).cpu()


# ---- schedule


def stop_states(n: int) -> States:
    """Which sets are on in the states that the stops look at: all sets, the sentence's own alone,
    all others, each other set alone.

    >>> stop_states(2)[:, 0].tolist()
    [[True, True], [True, False], [False, True], [False, True]]
    """
    own = torch.eye(n, dtype=torch.bool)
    each_other = [own.roll(k, 1) for k in range(1, n)]
    return torch.stack([torch.ones_like(own), own, ~own, *each_other])


def sets_on(step: int, n: int, generator: torch.Generator) -> States:
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
    return torch.stack([of_losses[step % 4], of_kls[step % 4]])


# ---- training


def _train(
    training: JointTraining,
    limits: Tensor,
    max_steps: int,
    report: TextReport,
    resume: TrainingState | None,
    keep: Callable[[TrainingState], None] | None,
) -> tuple[Tensor, Tensor]:
    """Train until every sentence is below the limits in all states of the stops.

    Returns:
        the loss of each sentence at each step, [step sentence]; at the end what each sentence has
        in the states of the stops, [state sentence].
    """
    n = len(training.sequences)
    states = stop_states(n)
    generator = torch.Generator().manual_seed(int(training.seed))
    # what each sentence had in each of these states when training last met it
    seen = torch.full(states.shape[:2], math.inf)
    history: list[Tensor] = []
    drawn = torch.stack([sets_on(step, n, generator) for step in range(max_steps)])
    drawn_on_device = drawn.to(training.view.device)  # one copy for all steps
    if resume is not None:
        training.rows.go_on_from(resume)
        history, seen = list(resume.losses), resume.seen
    for step in range(len(history), max_steps):
        on = drawn[step]
        training.rows.adam.zero_grad()
        means = training.means(on, drawn_on_device[step], train=True)
        history.append(means[0])
        for sequence, value in zip(training.sequences, means.sum(0).tolist(), strict=True):
            check_finite(value, step, sequence)
        for of_state, state in zip(means, on, strict=True):
            seen = torch.where((states == state).all(-1), of_state, seen)
        done = step == max_steps - 1
        if done or bool((seen < limits).all()):
            seen = training.means(states, states.to(training.view.device))
            done = done or bool((seen < limits).all())
        report(1.0 if done else (step + 1) / max_steps, step_text(step, means[0].tolist()))
        if done:
            break
        training.rows.adam.step()
        if keep is not None and (step + 1) % KEPT_EVERY == 0:
            changes = [change.detach().clone().cpu() for change in training.rows.changes.values()]
            moments, losses = training.rows.moments(), torch.stack(history)
            keep(TrainingState(training.about, changes, moments, losses, seen))
    history[-1] = seen[0]
    return torch.stack(history), seen
