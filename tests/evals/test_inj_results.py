"""The tables that are made of what INJ measured."""


def test_inj_table_counts_injections_that_did_not_converge(gpt2_like, sentences):
    from tl_localize import Activations
    from tl_localize.evals.inj_benchmark import InjBenchmark

    results = InjBenchmark(model=gpt2_like, sequences=sentences, ratio=0.2, max_steps=1).run(
        [Activations()]
    )
    assert "NONE of 3 injections converged" in results.table().index[0][0]
    frame = results.frame.copy()
    frame.loc[frame["sequence_id"] != "s0", "converged"] = True
    frame.loc[frame["sequence_id"] == "s0", "recall"] = 0.0
    mixed = type(results)(frame, {})
    assert "1 more did NOT converge" in mixed.table().index[0][0]
    alone = type(results)(frame[frame["converged"]], {})
    assert mixed.table().to_numpy().tolist() == alone.table().to_numpy().tolist()


def test_inj_tests_compare_with_integrated_gradients(benchmark):
    from tl_localize import Activations, IntegratedGradients

    results = benchmark.run([Activations(), IntegratedGradients(steps=2)])
    frame = results.frame.copy()
    frame["converged"] = True
    tests = type(results)(frame, {}).tests()
    assert set(tests["method"]) == {"activations", "random", "row_norm"}
    assert (tests["level"] == 0.05 / 3).all()


def test_summary_holds_the_numbers_of_the_table(together):
    from dataclasses import replace

    from tl_localize import Activations

    results = together.run([Activations()])
    results = replace(results, frame=results.frame.assign(converged=True))
    keys = ["method", "multiple", "metric"]
    row = results.summary().set_index(keys).loc[("activations", 1, "foreign_recall")]
    part = results.frame.query("method == 'activations' and multiple == 1")
    groups = part.groupby("group")["foreign_recall"].mean()
    assert row["mean"] == groups.mean() and row["n"] == len(groups)
    text = f"{100 * row['mean']:.1f} ± {100 * row['standard_error']:.1f}"
    assert results.table().xs("activations", level=1)["R@1x"].iloc[0].endswith(text)


def test_compare_seeds_pairs_sentences(benchmark):
    from dataclasses import replace

    from tl_localize import Activations
    from tl_localize.evals.inj_results import compare_seeds

    first = benchmark.run([Activations()])
    second = replace(benchmark, seed=100).run([Activations()])
    for results in (first, second):
        results.frame["converged"] = True
    table = compare_seeds(first, second)
    assert (table["n"] == 3).all()
    same = compare_seeds(first, first)
    assert (same["p_value"] == 1).all()


def test_inj_results_save_writes_frame_and_settings(benchmark, tmp_path):
    import json

    import pandas as pd

    from tl_localize import Activations

    results = benchmark.run([Activations()])
    results.save(tmp_path / "out")
    assert len(pd.read_csv(tmp_path / "out" / "frame.csv")) == len(results.frame)
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert settings["runs"][0]["methods"]["activations"]["absolute"] == "token"


def test_inj_results_save_takes_away_what_is_no_longer_missing(benchmark, tmp_path):
    from dataclasses import replace

    import pandas as pd

    from tl_localize import Activations

    results = benchmark.run([Activations()])
    replace(
        results, missing=pd.DataFrame([{"method": "activations", "reason": "not yet done"}])
    ).save(tmp_path)
    assert (tmp_path / "missing.csv").exists()
    results.save(tmp_path)
    assert not (tmp_path / "missing.csv").exists()


def test_distractors_table_prints_own_and_foreign_with_levels(together):
    from tl_localize import Activations

    table = together.run([Activations()]).table()
    block = table.index[0][0]
    assert table.loc[(block, "level: altered rows of any sentence"), "R@1x"] == "50.0 / 50.0"
    assert table.loc[(block, "level: chance"), "R@1x"] == "10.0 / 10.0"
    assert table.loc[(block, "true_rows"), "R@1x"].startswith("100.0 ± 0.0 / 0.0")


def test_pairs_of_methods_compare_groups():
    """By hand: two sentences in each of three groups, of which one did not converge; a second share
    is not looked at.
    """
    import pandas as pd
    from scipy.stats import ttest_rel

    from tl_localize.evals import InjResults

    recalls = {"good": [0.9, 0.7, 0.8, 0.8, 0.6, 0.4], "bad": [0.5, 0.5, 0.2, 0.6, 0.1, 0.9]}
    about = {"injection_ratio": 0.03, "ratio": 0.03, "multiple": 1}
    rows = [
        {
            **about,
            "sequence_id": f"{i}",
            "group": f"{i // 2}",
            "method": method,
            "recall": x,
            "foreign_recall": 1 - x,
            "converged": i < 5,
        }
        for method, some in recalls.items()
        for i, x in enumerate(some)
    ]
    results = InjResults(
        pd.DataFrame(
            [*rows, *(row | {"multiple": 2, "ratio": 0.06, "recall": 1.0} for row in rows)]
        )
    )
    good, bad = [0.8, 0.8, 0.6], [0.5, 0.4, 0.1]  # of each group
    p = ttest_rel(good, bad, alternative="greater").pvalue
    assert results.pairs().loc["good", "bad"] == f"40.0 (p = {p:.1g})"
    assert results.pairs("foreign_recall").loc["good", "bad"] == f"-40.0 (p = {p:.1g})"
    assert results.pairs().loc["bad", "good"] == f"-40.0 (p = {1 - p:.1g})"
