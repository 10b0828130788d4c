"""The slow, obvious forms of the methods that have a fast one: definitions, one forward pass at a
time, nothing shared with the package.
"""

from functools import partial

import torch


def in_double(model):
    """The model itself, its weights in float64 from now on."""
    model.to(torch.float64)
    model.cfg.dtype = torch.float64
    return model


def loss_of(model, tokens, n_prefix):
    """Memorization loss from the logits of every position: nats per suffix token, in float64, so
    that differences keep their digits.
    """
    log_p = (
        model(tokens[None], return_type="logits", padding_side="right")[0].double().log_softmax(-1)
    )
    positions = torch.arange(n_prefix - 1, len(tokens) - 1)
    return -log_p[positions, tokens[positions + 1]].mean()


def parameter_of(weight):
    """The parameter that a weight of a model is, or of which it is, in some Bridges, the transposed
    view.
    """
    return weight if weight._base is None else weight._base


def name_of(model, weight):
    """The name of its parameter among a model's, as torch counts them."""
    names = {id(own): name for name, own in torch.nn.Module.named_parameters(model)}
    return names[id(parameter_of(weight))]


def turned_as(weight, values):
    """Values in the axes of ``parameter_of(weight)``, in those of the weight; or the other way
    round.
    """
    return values if weight._base is None else values.T


def row_gradients(model, number):
    """[layer neuron d_model]: gradient of a number for W_out."""
    weights = [block.mlp.W_out for block in model.blocks]
    found = torch.autograd.grad(number, [parameter_of(weight) for weight in weights])
    turned = [turned_as(weight, part) for weight, part in zip(weights, found, strict=True)]
    return torch.stack(turned).detach()


def zero_at(act, hook, *, neuron):
    act = act.clone()
    act[:, :, neuron] = 0
    return act


def put_last(act, hook, *, values):
    return torch.cat([act[:, :-1], values[:, None]], dim=1)


@torch.no_grad()
@torch.no_grad()
def plain_zero_out(model, sequence, every=1, among=None):
    """[layer neuron]: rise of the loss when the neuron is zero everywhere, one forward pass per
    neuron.

    Of every so many neurons, or of those in the mask ``among`` alone, and nan elsewhere.
    """
    tokens, n_prefix = sequence.tokens, sequence.n_prefix
    baseline = loss_of(model, tokens, n_prefix)
    some = range(0, len(model.blocks[0].mlp.W_out), every)
    scores = torch.full((model.cfg.n_layers, len(some)), torch.nan)
    for layer in range(model.cfg.n_layers):
        for i, neuron in enumerate(some):
            if among is None or among[layer, neuron]:
                with model.hooks(
                    fwd_hooks=[(f"blocks.{layer}.mlp.hook_post", partial(zero_at, neuron=neuron))]
                ):
                    scores[layer, i] = loss_of(model, tokens, n_prefix) - baseline
    return scores


def plain_integrated_gradients(model, sequence, points, weights):
    """[layer neuron]: the paper's A.2, one forward and one backward pass per layer and position,
    the points of the path side by side.
    """
    tokens, n_prefix = sequence.tokens, sequence.n_prefix
    clean = {}

    def record(act, hook, *, layer):
        clean[layer] = act[0].detach().clone()

    names = [f"blocks.{layer}.mlp.hook_post" for layer in range(model.cfg.n_layers)]
    with (
        torch.no_grad(),
        model.hooks(
            fwd_hooks=[(name, partial(record, layer=layer)) for layer, name in enumerate(names)]
        ),
    ):
        model(tokens[None], padding_side="right")
    scores = torch.zeros(model.cfg.n_layers, len(model.blocks[0].mlp.W_out))
    positions = range(n_prefix - 1, len(tokens) - 1)
    for layer, name in enumerate(names):
        for position in positions:
            h = clean[layer][position]
            values = (points[:, None] * h.float()).to(h.dtype).requires_grad_()
            truncated = tokens[None, : position + 1].expand(len(points), -1)
            with model.hooks(fwd_hooks=[(name, partial(put_last, values=values))]):
                logits = model(truncated, return_type="logits", padding_side="right")[:, -1]
            probability = logits.float().softmax(-1)[:, tokens[position + 1]]
            (gradients,) = torch.autograd.grad(probability.sum(), values)
            scores[layer] += h.float() * (weights @ gradients.float()) / len(positions)
    return scores


# Settings of models whose attention differs from GPT-2's ...
ATTENTION = {
    "alibi": {"positional_embedding_type": "alibi"},
    "soft cap": {"attn_scores_soft_cap": 0.5},
    "local window": {
        "use_local_attn": True,
        "attn_types": ["local", "global", "local"],
        "window_size": 3,
        "n_layers": 3,
    },
    "sinks": {"use_attention_sinks": True},
    "no scale": {"use_attn_scale": False},
    "inverse layer scale": {"scale_attn_by_inverse_layer_idx": True},
    "split inputs": {"use_split_qkv_input": True},
    "results per head": {"use_attn_result": True},
    "ungrouped": {
        "n_heads": 4,
        "d_head": 6,
        "n_key_value_heads": 2,
        "ungroup_grouped_query_attention": True,
    },
    "grouped": {"n_heads": 4, "d_head": 6, "n_key_value_heads": 1},
    "query and key norm": {
        "use_qk_norm": True,
        "positional_embedding_type": "rotary",
        "rotary_dim": 8,
        "normalization_type": "RMS",
    },
    "norm before and after": {
        "use_normalization_before_and_after": True,
        "normalization_type": "RMS",
    },
    "norm after": {
        "original_architecture": "Olmo2ForCausalLM",
        "normalization_type": "RMS",
        "positional_embedding_type": "rotary",
    },
    "no norm": {"normalization_type": None, "act_fn": "relu"},
    "solu": {"act_fn": "solu_ln"},
}

# ... and of those in which Integrated Gradients cannot take all positions in one pass, by the
# reason that its warning gives.
ONE_BY_ONE = {
    "clipped": {"clip_qkv": 0.1},
    "keys are normalized": {"use_qk_norm": True, "normalization_type": "RMS"},
    "length beyond 4": {"use_logn_attn": True, "train_seq_length": 4},
    "length beyond 5": {
        "use_dynamic_ntk_rope": True,
        "train_seq_length": 5,
        "positional_embedding_type": "rotary",
        "rotary_dim": 8,
    },
}


# Hooks that a user may have put on the model.
def times(act, hook, *, factor):
    return act * factor


def turned(act, hook):
    return act + 0.3 * act.roll(1, -1).tanh()


def times_neuron(layer, neuron, factor):
    """Hook that multiplies one neuron."""

    def scale(act, hook):
        act = act.clone()
        act[:, :, neuron] *= factor
        return act

    return f"blocks.{layer}.mlp.hook_post", scale


def mean_probability(model, sequence):
    positions = torch.arange(sequence.n_prefix - 1, len(sequence.tokens) - 1)
    logits = model(sequence.tokens[None], return_type="logits", padding_side="right")[0]
    return logits.double().softmax(-1)[positions, sequence.tokens[positions + 1]].mean()


def gate_gradient_of(model, sequence, objective, gates=None):
    """[layer neuron]: slope of the objective in a gate on each neuron, by hooks; gates are one
    unless given.
    """
    if gates is None:
        gates = torch.ones(model.cfg.n_layers, model.cfg.d_mlp)
    gates = gates.clone().requires_grad_()
    hooks = [
        (f"blocks.{i}.mlp.hook_post", lambda act, hook, gate=gate: act * gate.to(act))
        for i, gate in enumerate(gates)
    ]
    with model.hooks(fwd_hooks=hooks):
        return torch.autograd.grad(objective(model, sequence), gates)[0]
