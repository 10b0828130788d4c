"""What a run has where the user says nothing, and how names become methods, data and benchmarks."""

import pytest


def test_paper_settings_make_valid_methods():
    from tl_localize import HardConcrete, Slimming
    from tl_localize.evals.presets import paper_settings

    for model in ("gpt2", "gpt2-xl", "pythia-2.8b-deduped", "pythia-6.9b-deduped"):
        for ratio in (0.01, 0.001):
            settings = paper_settings(model, "inj", ratio)
            assert HardConcrete(**settings["hard_concrete"]).steps == 4000
            assert Slimming(**settings["slimming"]).steps == 4000


def test_paper_settings_differ_by_ratio_where_the_paper_does():
    from tl_localize.evals.presets import paper_settings

    assert paper_settings("gpt2", "inj", 0.001)["hard_concrete"]["sparsity_weight"] == 1000
    assert paper_settings("gpt2", "inj", 0.01)["hard_concrete"]["sparsity_weight"] == 100
    assert paper_settings("reference-gpt2", "del") == {}


def test_paper_settings_are_empty_for_another_model():
    from tl_localize.evals.presets import paper_settings

    assert paper_settings("reference-gpt2", "del") == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./gpt2-xl", "gpt2-xl"),
        ("/models/gpt2-xl/", "gpt2-xl"),
        ("EleutherAI/pythia-2.8b-deduped-v0", "pythia-2.8b-deduped"),
        ("models/Pythia-6.9B-deduped-v0", "pythia-6.9b-deduped"),
        ("openai-community/gpt2", "gpt2"),
        ("gpt2-xl-finetuned", "gpt2-xl-finetuned"),
    ],
)
def test_paper_model_reads_directories_and_first_versions(name, expected):
    from tl_localize.evals.presets import paper_model

    assert paper_model(name) == expected


def test_settings_source_names_the_paper_or_the_defaults():
    from tl_localize.evals.presets import settings_source

    assert settings_source("./gpt2", "inj") == "the paper's for gpt2"
    assert settings_source("./gpt2", "del") == "the defaults, for the paper has none for gpt2"


def test_del_methods_spare_the_first_layer_and_take_the_seed():
    from tl_localize.evals.presets import del_methods

    tuned = {"slimming": {"first_layer": 0, "steps": 5}}
    hard, slim, noise = del_methods(
        "hard_concrete,slimming,random", ["slimming.steps=7"], "reference-gpt2", tuned, 3
    )
    assert (hard.first_layer, slim.first_layer, slim.steps, noise.seed) == (1, 1, 7, 3)
    paper, _ = del_methods("hard_concrete,slimming", [], "gpt2-xl")
    assert (paper.steps, paper.sparsity_weight, paper.initial_mask) == (200, 1000.0, 0.9)


def test_ratios_are_the_papers_or_larger_ones_of_the_reference_models():
    from tl_localize.evals.presets import del_ratios, inj_ratios

    assert (inj_ratios("gpt2"), inj_ratios("reference")) == ([0.01, 0.001], [0.03])
    assert (del_ratios("gpt2"), del_ratios("reference-pythia")) == ((0.001, 0.005), (0.02, 0.1))


def test_targets_are_drawn_by_seed_and_dev_sequences_stay_first(make_sequences):
    from tl_localize.evals.presets import drawn_first

    sequences = make_sequences(*[(4, 2)] * 20)
    drawn = [[sequence.id for sequence in drawn_first(sequences, 5, seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][:5] == ["s0", "s1", "s2", "s3", "s4"]
    assert sorted(drawn[0]) == sorted(sequence.id for sequence in sequences)


@pytest.mark.parametrize("text", ["", "few", "zero_uot=6", "=6", "6,zero_out"])
def test_parse_targets_rejects(text):
    from tl_localize.evals.presets import parse_targets

    with pytest.raises(ValueError, match="targets must be a number, and METHOD=NUMBER"):
        parse_targets(text)


@pytest.fixture
def benchmark(gpt2_like, make_sequences):
    import torch

    from tl_localize import DelBenchmark

    text = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    sequences = make_sequences(*[(10, 4)] * 4)
    return DelBenchmark(
        gpt2_like,
        sequences,
        text,
        ratios=(0.1, 0.3),
        n_dev=1,
        decode=lambda ids: " ".join(map(str, ids)),
    )


def test_del_runs_are_one_for_each_number_of_targets(benchmark):
    from tl_localize import Activations, DelResults, RandomBaseline, ZeroOut
    from tl_localize.evals.presets import del_runs

    methods = [Activations(), ZeroOut(), RandomBaseline()]
    runs = del_runs(benchmark, methods, {"zero_out": 2})
    assert [(one.n_targets, [method.name for method in some]) for one, some in runs] == [
        (None, ["activations", "random"]),
        (2, ["zero_out"]),
    ]
    frame = DelResults.join([one.run(some) for one, some in runs]).frame
    assert frame.groupby("method")["sequence_id"].nunique().to_dict() == {
        "activations": 3,
        "random": 3,
        "zero_out": 2,
    }


def test_single_layer_run_takes_the_largest_ratio_whose_budget_fits(benchmark, tmp_path):
    from dataclasses import replace

    from tl_localize import Activations
    from tl_localize.evals.presets import single_layer_run
    from tl_localize.execution import Store

    single, methods = single_layer_run(benchmark, Activations())
    assert single.ratios == (0.1,)  # 5 x 0.3 of the one layer above the first is more than there is
    store = Store(tmp_path)
    single.run(methods, store)
    assert set(replace(single, ratios=(0.2,)).run(methods, store)["ratio"]) == {0.1, 0.2}
