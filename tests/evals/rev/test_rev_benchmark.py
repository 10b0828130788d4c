"""REV: sentences in all rows of a model, and units that are put back."""

import copy
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch


@pytest.fixture
def brief(rev, normless):
    """Where it does not matter what is learned: two sentences of each model in five steps."""
    rev = replace(rev, model=normless)
    recipe = replace(rev.recipe, max_steps=5, stop_loss=99.0)
    return replace(rev, n_sequences=2, ratios=(0.5,), recipe=recipe)


def bits(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_table_counts_models_that_are_missing(brief, one_oracle):
    from tl_localize import Activations

    found = replace(brief, ratios=(0.5, 1.0)).run([Activations()], shard=(1, 2))
    assert len(found.missing) > len(found.missing["method"].unique())
    assert set(found.table()["missing"]) == {"1"}


def test_put_back_and_graft_agree_with_copied_rows(rev, one_oracle):
    from tl_localize import Activations, accuracy
    from tl_localize.injection.recipes import learn
    from tl_localize.metrics import sequence_losses

    before = bits(rev.model)
    frame = replace(rev, n_groups=1, ratios=(0.5,)).run([Activations()]).frame
    assert all(map(torch.equal, before, bits(rev.model)))
    assert frame["converged"].all()
    group = rev.groups()[0].sequences
    learned = learn(rev.model, group, rev.recipe)
    model = copy.deepcopy(rev.model)
    names = list(learned.weights)
    general = rev.general_tokens[1::2]  # the other half may be mixed in
    base = [rev.model.blocks[layer].mlp.W_out.detach() for layer in range(2)]
    rows = [learned.weights[name] for name in names]

    def write(parts):
        for block, part in zip(model.blocks, parts, strict=True):
            block.mlp.W_out.data.copy_(part)

    for direction in ("put_back", "graft"):
        start, other = (rows, base) if direction == "put_back" else (base, rows)
        for k, sequence in enumerate(group):
            write(rows)
            mask = Activations()(model, sequence).top_k(0.5).mask
            write(start)
            intact = accuracy(model, group)
            loss = sequence_losses(model, general).mean()
            write(
                [torch.where(m[:, None], o, s) for m, o, s in zip(mask, other, start, strict=True)]
            )
            change = (accuracy(model, group) - intact).tolist()
            row = frame.query(f"method == 'activations' and direction == '{direction}'")
            row = row[row["sequence_id"] == sequence.id].iloc[0]
            assert row["delta_own_accuracy"] == pytest.approx(change.pop(k), abs=1e-6)
            assert row["delta_others_accuracy"] == pytest.approx(np.mean(change), abs=1e-6)
            moved = float(sequence_losses(model, general).mean() - loss)
            assert row["delta_general_loss"] == pytest.approx(moved, abs=1e-5)
            assert abs(moved) > 1e-4


@pytest.mark.parametrize(("n_rows", "n_measured"), [(3, 1), (20, 6)])
def test_rows_of_general_text_are_measured_or_mixed_in(
    brief, one_oracle, monkeypatch, n_rows, n_measured
):
    from tl_localize.evals.rev import benchmark as rev_benchmark

    mixed, measured = [], []
    learn, losses = rev_benchmark.learn, rev_benchmark.sequence_losses
    monkeypatch.setattr(
        rev_benchmark, "learn", lambda *a, **k: mixed.append(k["general_tokens"]) or learn(*a, **k)
    )
    monkeypatch.setattr(
        rev_benchmark,
        "sequence_losses",
        lambda model, text, **k: measured.append(text) or losses(model, text, **k),
    )
    rows = torch.arange(16 * n_rows).view(n_rows, 16) % 48
    recipe = replace(brief.recipe, general=1)
    replace(brief, general_tokens=rows, n_groups=1, recipe=recipe).run()
    assert len(measured[0]) == n_measured
    assert sorted(torch.cat([mixed[0], measured[0]]).tolist()) == sorted(rows.tolist())


def test_all_units_put_back_give_the_model_before(rev):
    """Whatever ranked them: with all units the sentence is as well known as before, or as after."""
    from tl_localize import accuracy

    frame = replace(rev, n_groups=1, ratios=(1.0,)).run().frame
    sequences = rev.groups()[0].sequences
    known = accuracy(rev.model, sequences).tolist()
    for sequence, was in zip(sequences, known, strict=True):
        rows = frame[frame["sequence_id"] == sequence.id]
        back = rows[rows["direction"] == "put_back"]["delta_own_accuracy"]
        given = rows[rows["direction"] == "graft"]["delta_own_accuracy"]
        np.testing.assert_allclose(-back, given, atol=1e-6)
        np.testing.assert_allclose(1 + back, was, atol=0.2)


def test_first_order_oracle_is_the_derivative_of_moving_a_unit_back(rev):
    from tl_localize.evals.rev.oracles import Change, Gradients
    from tl_localize.injection.recipes import assigned, learn, read_units
    from tl_localize.metrics import mean_log_odds
    from tl_localize.model.neurons import NeuronView
    from tl_localize.sequences import SequenceBatch

    group = rev.groups()[0].sequences
    learned = learn(rev.model, group, replace(rev.recipe, weights="all"))
    view = NeuronView(rev.model)
    base = {name: p.detach().clone() for name, p in rev.model.named_parameters()}
    with assigned(rev.model, learned.weights):
        after = read_units(view, learned.weights)
        change = Change(view, group, list(base), read_units(view, base), after)
        found = Gradients()(change, 0)
    batch = SequenceBatch.of([group[0]])

    def odds(neuron, step):
        weights = {name: weight.double().clone() for name, weight in learned.weights.items()}
        model = copy.deepcopy(rev.model).double()
        for name, axis in (("W_out", 0), ("W_in", 1), ("b_in", 0)):
            weight = getattr(model.blocks[1].mlp, name)
            (key,) = [key for key, own in model.named_parameters() if own is weight]
            part = weights[key].movedim(axis, 0)
            part[neuron] += step * (base[key] - weights[key]).movedim(axis, 0)[neuron]
        with assigned(model, weights), torch.no_grad():
            return float(mean_log_odds(model, batch).sum())

    slopes = torch.tensor([(odds(i, -0.05) - odds(i, 0.05)) / 0.1 for i in range(6)])
    scores = found.values[1][:6]
    torch.testing.assert_close(scores / scores.norm(), slopes / slopes.norm(), rtol=0.02, atol=0.01)


def test_learned_mask_begins_with_the_slopes_of_its_objective_and_loses_only_the_target(rev):
    from tl_localize import accuracy
    from tl_localize.evals.rev.oracles import Change, LearnedMask
    from tl_localize.injection.recipes import assigned, learn, read_units, units_replaced
    from tl_localize.metrics import batch_loss, mean_unlikelihood
    from tl_localize.model.neurons import NeuronView
    from tl_localize.sequences import SequenceBatch

    group = rev.groups()[0].sequences
    learned = learn(rev.model, group, rev.recipe)
    view = NeuronView(rev.model)
    base = [block.mlp.W_out.detach().clone() for block in rev.model.blocks]
    before = read_units(view)
    with assigned(rev.model, learned.weights):
        change = Change(view, group, list(learned.weights), before, read_units(view))
        first = LearnedMask(steps=1)(change, 0).values
        found = LearnedMask(steps=30)(change, 0)
        with units_replaced(view, found.top_k(0.5).mask, change.before):
            lost = 1 - accuracy(rev.model, group)
    assert lost[0] > lost[1:].mean() + 0.2

    target, others = SequenceBatch.of(group[:1]), SequenceBatch.of(group[1:])
    model = copy.deepcopy(rev.model).double()

    def objective(unit, step):
        for layer, (was, now) in enumerate(zip(base, learned.weights.values(), strict=True)):
            part = torch.full((len(was), 1), 0.5, dtype=torch.double)
            part[unit] += step if layer == 1 else 0
            model.blocks[layer].mlp.W_out.data.copy_(now + part * (was - now))
        with torch.no_grad():
            return float(mean_unlikelihood(model, target) + batch_loss(model, others).mean())

    slopes = torch.tensor([objective(i, 0.01) - objective(i, -0.01) for i in range(12)])
    # Adam's first step is its rate, against the slope
    torch.testing.assert_close(first[1][:12], -0.1 * slopes.sign(), rtol=0, atol=1e-3)


def test_every_method_is_compared_with_the_reference(brief):
    from tl_localize import Activations

    results = replace(brief, n_groups=1).run([Activations()])
    assert set(results.table().index) >= {"activations", "random", "oracle_first_order"}
    assert set(results.tests()["method"]) == set(results.table().index) - {"activations"}


@pytest.mark.parametrize(
    ("inside", "error"),
    [
        ("injection.recipes.batch_loss", KeyboardInterrupt),
        ("methods.activations.activations", RuntimeError),
        ("evals.rev.oracles.mean_log_odds", KeyboardInterrupt),
        ("evals.rev.benchmark.accuracy", RuntimeError),
    ],
)
def test_weights_are_back_after_an_error(brief, unchanged, monkeypatch, inside, error):
    """In training, in scoring, in an oracle and in measuring."""
    from tl_localize import Activations

    module, _, name = f"tl_localize.{inside}".rpartition(".")
    right = getattr(sys.modules[module], name)
    calls = []

    def raises_later(*given, **named):
        calls.append(name)
        if len(calls) >= 2:
            raise error
        return right(*given, **named)

    monkeypatch.setattr(f"{module}.{name}", raises_later)
    check = unchanged(brief.model)
    with pytest.raises(error):
        brief.run([Activations()])
    check()
    assert len(calls) >= 2


def test_texts_of_the_same_kind_are_of_sentences_that_no_model_learns(rev):
    trained = replace(rev, n_groups=None).groups()
    labelled = rev.label([])
    texts = labelled["activation_contrast_same_kind"].texts
    every = [tuple(sequence.tokens.tolist()) for sequence in rev.sequences]
    learned = [tuple(sequence.tokens.tolist()) for group in trained for sequence in group.sequences]
    assert len(texts) == 3 and len(learned) == 6
    assert set(texts) <= set(every) and not set(texts) & set(learned)
    # more models leave the method as it is
    assert replace(rev, n_groups=1).label([]) == labelled


def test_other_methods_that_read_general_text_get_texts_of_the_same_kind_too(rev):
    from tl_localize import ActivationContrast, SelectivePruning

    own = SelectivePruning(texts=((1, 2),))
    labelled = rev.label([SelectivePruning(importance="abs"), ActivationContrast()])
    twin = labelled["selective_pruning_same_kind"]
    ours = labelled["activation_contrast_same_kind"]
    assert twin == SelectivePruning(importance="abs", texts=ours.texts)
    assert sum(label.endswith("same_kind") for label in labelled) == 2
    assert "selective_pruning_same_kind" not in rev.label([own])


def test_there_is_no_list_without_sentences_that_are_left(rev):
    few = replace(rev, sequences=rev.sequences[:4], n_groups=1)
    assert "activation_contrast_same_kind" not in few.label([])
    assert {"random", "row_norm"} < few.label([]).keys()


def test_an_earlier_checkpoint_takes_the_place_of_training(rev, one_oracle):
    from tl_localize import RevBenchmark
    from tl_localize.injection.recipes import learn

    group = rev.groups()[0].sequences
    before = copy.deepcopy(rev.model)
    later = copy.deepcopy(rev.model)
    for name, weight in learn(later, group, rev.recipe).weights.items():
        later.get_parameter(name).data.copy_(weight)
    own = bits(later)
    with pytest.raises(ValueError, match="n_groups must be left out"):
        RevBenchmark(later, group, rev.general_tokens, before=before, n_groups=2)
    for setting in ({"n_sequences": 2}, {"recipe": replace(rev.recipe, general=3)}):
        with pytest.raises(ValueError, match=f"{next(iter(setting))} must be left out"):
            RevBenchmark(later, group, rev.general_tokens, before=before, **setting)
    benchmark = RevBenchmark(later, group, rev.general_tokens, before=before, ratios=(0.5, 1.0))
    assert benchmark.groups()[0].sequences
    frame = benchmark.run().frame
    assert all(map(torch.equal, own, bits(later)))
    back = frame[(frame["direction"] == "put_back") & (frame["ratio"] == 1.0)]
    assert (back["delta_own_accuracy"] < 0).all()
    with pytest.raises(ValueError, match="none among 3"):
        RevBenchmark(before, group, rev.general_tokens, before=later)
    after = copy.deepcopy(later)
    after.blocks[0].mlp.W_out.data[0] += 1e-6
    with pytest.raises(ValueError, match=f"'{group[0].id}', which both recite"):
        RevBenchmark(after, group, rev.general_tokens, before=later)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("ratios", ()),
        ("ratios", (0.5, 0.1)),
        ("ratios", (1e-9,)),
        ("n_sequences", 0),
        ("n_groups", 9),
        ("seed", -1),
    ],
)
def test_bad_arguments_are_named(rev, argument, value):
    with pytest.raises(ValueError, match=argument.removesuffix("s").removeprefix("n_")):
        replace(rev, **{argument: value})


def test_what_would_fail_in_each_cell_is_refused_first(rev, gpt2_like):
    same = replace(rev.sequences[0], id="")
    with pytest.raises(ValueError, match="sequences must have different ids"):
        replace(rev, sequences=[*rev.sequences, rev.sequences[0]])
    with pytest.raises(TypeError, match="recipe must be a Recipe, got 'sgd'"):
        replace(rev, recipe="sgd")
    with pytest.raises(ValueError, match="ratios must be fractions in rising order that differ"):
        replace(rev, ratios=(0.333333, 1 / 3))
    with pytest.raises(ValueError, match="sequences must be different texts"):
        type(rev)(rev.model, [rev.sequences[0], same], rev.general_tokens, before=rev.model)
    gpt2_like.bfloat16()
    with pytest.raises(ValueError, match=r"model must be in float32, got torch\.bfloat16"):
        replace(rev, model=gpt2_like)


def made_by_hand():
    """Four sentences of two methods at seven shares, in both directions."""
    import pandas as pd

    from tl_localize import RevResults

    rows = [
        {
            "sequence_id": f"s{s}",
            "method": method,
            "group": "group-00",
            "direction": direction,
            "converged": True,
            "steps": 9,
            "ratio": ratio,
            "delta_own_accuracy": sign * ratio * size,
            "delta_others_accuracy": sign * ratio * (0.19 + s / 100),
            "delta_general_loss": 0.1,
        }
        for method, size in (("activation_contrast_same_kind", 1.5), ("random", 0.3))
        for s in range(4)
        for direction, sign in (("put_back", -1), ("graft", 1))
        for ratio in (0.05, 0.1, 0.2, 0.25, 0.3, 0.35, 0.4)
    ]
    return RevResults(pd.DataFrame(rows))


def test_the_printed_table_of_rev_fits_100_columns(capsys):
    from tl_localize.cli.publish import print_results
    from tl_localize.cli.reports import report_rev
    from tl_localize.evals.rev import rev_tables
    from tl_localize.execution import Steps

    results = made_by_hand()
    report = replace(
        report_rev(Steps()),
        results=results,
        shown=lambda: rev_tables(results, errors=False)["rev"],
    )
    print_results(report, rev_tables(results), "rev")
    _caption, *lines = capsys.readouterr().out.strip().splitlines()
    assert max(map(len, lines)) <= 100
    shown = "\n".join(lines)
    assert all(f" {share} %" in shown for share in (5, 10, 20, 25, 30, 35, 40))
    assert shown.count("Activation Contrast, same kind") == 3  # two blocks, and a bar
    assert "own at others -5" in shown and "-60.0 / -8.2" in shown


def test_a_share_that_a_model_lacks_is_not_in_the_methods_curve():
    import pandas as pd

    one = made_by_hand()
    frame = pd.concat([one.frame, one.frame.assign(group="group-01")])
    right = replace(one, frame=frame)
    lacks = frame.eval("method == 'random' and ratio == 0.4 and group == 'group-01'")
    results = replace(one, frame=frame[~lacks])
    table = results.table()
    assert table.loc["random", "40 %"] == "-"
    assert table.drop("random").equals(right.table().drop("random"))
    own, _ = results.points()["random"]
    assert np.array_equal(own, right.points()["random"][0][:, :-1])
    tested = results.tests("random").set_index("method")["difference"]
    assert tested.notna().all()


def test_table_and_figure_of_rev_have_one_sign():
    from tl_localize.cli.reports import FIGURES
    from tl_localize.evals.rev import rev_figures

    results = made_by_hand()
    figures = rev_figures(results)
    assert set(figures) <= set(FIGURES)  # a page has a caption of each
    panels = figures["rev_curves"].axes
    for panel, direction in zip(panels, ("put_back", "graft"), strict=True):
        cell = results.table(direction, errors=False).loc["random", "40 %"]
        own, others = (float(part) for part in cell.split(" / "))
        (drawn,) = [
            container for container in panel.containers if container.get_label() == "Random"
        ]
        x, y = drawn.lines[0].get_data()
        assert (y[-1], x[-1]) == pytest.approx((own, others), abs=0.05)
        assert (own < 0) == (direction == "put_back")


def test_what_others_gain_is_no_cost_of_rows_that_are_put_back():
    right = made_by_hand()
    frame = right.frame.assign(delta_others_accuracy=-right.frame["delta_others_accuracy"])
    cells = replace(right, frame=frame).table(errors=False)["own at others -5"]
    assert cells["random"] == "-12.0 at +8.2"  # no share costs 5 points: the largest
    assert right.table(errors=False)["own at others -5"]["random"] != cells["random"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rev_without_gradients_of_the_caller(brief, mode):
    from tl_localize import Activations

    once = replace(brief, n_groups=1)
    with mode():
        found = once.run([Activations()]).frame
    wanted = once.run([Activations()]).frame
    assert found.equals(wanted)


def test_oracle_in_rounds_puts_back_what_earlier_rounds_chose(gpt2_like, make_sequences):
    """8 of 48 units of each layer in each of 3 rounds, against a loop."""
    from tl_localize.evals.rev.oracles import Change, Gradients
    from tl_localize.injection.recipes import (
        Recipe,
        assigned,
        learn,
        read_units,
        units_replaced,
    )
    from tl_localize.metrics import mean_log_odds
    from tl_localize.model.neurons import NeuronView
    from tl_localize.sequences import SequenceBatch

    group = make_sequences((8, 1), (7, 1), d_vocab=50)
    learned = learn(gpt2_like, group, Recipe(learning_rate=0.01, max_steps=40))
    view = NeuronView(gpt2_like)
    before = read_units(view)
    order: list[list[int]] = [[], []]
    with assigned(gpt2_like, learned.weights):
        change = Change(view, group, list(learned.weights), before, read_units(view))
        batch = SequenceBatch.of(group[:1])
        for _ in range(3):
            gone = torch.zeros(2, 48, dtype=torch.bool)
            for layer, units in enumerate(order):
                gone[layer, units] = True
            with units_replaced(view, gone, before):
                effects = change.effects(lambda: mean_log_odds(gpt2_like, batch).sum())
            for units, own in zip(order, effects, strict=True):
                ranked = own.argsort(descending=True).tolist()
                units += [unit for unit in ranked if unit not in units][:8]
        found = Gradients(rounds=3)(change, 0).values
        at_once = Gradients()(change, 0).values
    assert found.argsort(descending=True)[:, :24].tolist() == order
    assert at_once.argsort(descending=True)[:, :24].tolist() != order


def test_a_method_is_not_given_a_sentence_that_a_model_learns(rev):
    from tl_localize import SelectivePruning

    learned = rev.groups()[0].sequences[0].tokens.tolist()
    with pytest.raises(ValueError, match="texts of 'selective_pruning' must share no 13 tokens"):
        rev.label([SelectivePruning(texts=((1, 2), tuple(learned)))])


def test_one_row_of_general_text_is_not_both_trained_and_measured(rev):
    mixed = replace(rev.recipe, general=1)
    with pytest.raises(ValueError, match="general_tokens must have 2 rows or more"):
        replace(rev, recipe=mixed, general_tokens=rev.general_tokens[:1])


@pytest.mark.parametrize("direction", ["put_back", "graft"])
def test_own_minus_others_at_most_is_read_in_the_direction_of_the_change(direction):
    results = made_by_hand()
    frame = results.frame
    others = frame["delta_others_accuracy"]
    wrong = frame.eval("method == 'random' and ratio == 0.4")
    # there the others change far more than the sentence
    frame = frame.assign(delta_others_accuracy=others.where(~wrong, 4 * others))
    results = replace(results, frame=frame)
    own, others = results.points(direction)["random"]
    gaps = (own - others).mean(0)
    shown = results.table(direction, errors=True)["own - others, at most"]["random"]
    best = gaps.min() if direction == "put_back" else gaps.max()
    assert abs(gaps).max() > abs(best) and shown == f"{best:.1f}"


def test_each_model_is_trained_with_a_seed_of_its_own(brief, one_oracle, monkeypatch):
    from tl_localize.evals.rev import benchmark as rev_benchmark

    learn, seeds = rev_benchmark.learn, []

    def spy(*given, seed, **how):
        seeds.append(seed)
        return learn(*given, seed=seed, **how)

    monkeypatch.setattr(rev_benchmark, "learn", spy)
    replace(brief, seed=5).run()
    assert seeds == [5, 6]


def test_of_many_texts_of_the_same_kind_the_direction_of_a_row_counts_less(rev):
    labelled = rev.label([])
    assert labelled["activation_contrast_same_kind"].alignment == 0.05


@pytest.mark.parametrize(("shares", "n_targets"), [((0.9, 0.89, 0.2), 1), ((0.9, 0.95, 0.9), 3)])
def test_a_text_is_recited_from_nine_tenths_on(rev, monkeypatch, shares, n_targets):
    from tl_localize import RevBenchmark
    from tl_localize.evals.rev import benchmark as rev_benchmark

    before = copy.deepcopy(rev.model)
    before.blocks[0].mlp.W_out.data[0] += 1e-6
    found = {id(rev.model): torch.tensor(shares), id(before): torch.tensor([0.1, 0.1, 0.89])}
    monkeypatch.setattr(rev_benchmark, "accuracy", lambda model, texts: found[id(model)])
    how = {"before": before, "ratios": (0.5,)}
    benchmark = RevBenchmark(rev.model, rev.sequences[:3], rev.general_tokens, **how)
    assert len(benchmark.groups()[0].sequences) == n_targets
    found[id(before)] = torch.tensor([0.9, 0.1, 0.1])
    with pytest.raises(ValueError, match="which both recite"):
        replace(benchmark, ratios=(0.5,))


def test_a_folder_refuses_another_earlier_checkpoint(rev, monkeypatch, tmp_path):
    """Its weights would be taken for those of the first one."""
    from tl_localize import RevBenchmark
    from tl_localize.evals.rev import benchmark as rev_benchmark
    from tl_localize.execution import Store

    def share(model, sequences):
        return torch.full((len(sequences),), 1.0 if model is rev.model else 0.0)

    monkeypatch.setattr(rev_benchmark, "accuracy", share)
    checkpoints = []
    for change in (0.1, 0.2):
        checkpoints.append(copy.deepcopy(rev.model))
        checkpoints[-1].blocks[1].mlp.W_out.data += change
    first, second = (
        RevBenchmark(rev.model, rev.sequences[:2], rev.general_tokens, before=before, ratios=(0.5,))
        for before in checkpoints
    )
    first.run(store=Store(tmp_path))
    with pytest.raises(ValueError, match=r"before: .* in the folder"):
        second.run(store=Store(tmp_path))


def test_error_bars_of_rev_are_upright_for_the_sentence_and_level_for_the_others():
    from tl_localize.evals.rev import rev_figures

    results = made_by_hand()
    other = results.frame.assign(group="group-01")
    other["delta_own_accuracy"] *= 1.5
    results = replace(results, frame=pd.concat([results.frame, other]))
    panel = rev_figures(results)["rev_curves"].axes[0]
    (drawn,) = [found for found in panel.containers if found.get_label() == "Random"]
    level, upright = (bars.get_segments()[-1] for bars in drawn.lines[2])
    assert np.ptp(level, axis=0) == pytest.approx([0, 0], abs=1e-6)  # the others are the same
    row = results.summary().query("direction == 'put_back' and method == 'random'").iloc[-1]
    assert np.ptp(upright, axis=0) == pytest.approx([0, 2 * row["own_error"]])
    assert row["own_error"] > 1


def test_the_figure_of_rev_has_the_shares_of_its_table():
    """A share that is not measured on all models of a method has no mean over them."""
    from tl_localize.evals.rev import rev_figures

    results = made_by_hand()
    other = results.frame.assign(group="group-01")
    largest = other["ratio"] == other["ratio"].max()
    results = replace(results, frame=pd.concat([results.frame, other[~largest]]))
    panel = rev_figures(results)["rev_curves"].axes[0]
    (line,) = [found for found in panel.containers if found.get_label() == "Random"]
    assert len(line.lines[0].get_xdata()) == len(results.points()["random"][0][0])
    assert len(results.points()["random"][0][0]) == results.frame["ratio"].nunique() - 1


def test_a_folder_of_rev_refuses_what_changes_its_numbers(brief, tmp_path):
    from tl_localize.execution import Store

    once = replace(brief, n_groups=1)
    once.run(store=Store(tmp_path))
    for name, changes in (
        ("recipe", {"recipe": replace(brief.recipe, max_steps=6)}),
        ("general_text", {"general_tokens": brief.general_tokens.flip(0)}),
        ("seed: 0 in the folder, 3", {"seed": 3}),
    ):
        with pytest.raises(ValueError, match=f"{name}.* now"):
            replace(once, **changes).run(store=Store(tmp_path))
