"""What the experiment's script does outside of its machine: it goes on where it stopped, and writes its table."""

import importlib.util
import json
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "bench" / "experiment.py"


@pytest.fixture(scope="module")
def experiment():
    spec = importlib.util.spec_from_file_location("experiment", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plan(experiment, tmp_path):
    return {
        "out": str(tmp_path), "schedule": "c1", "phases": experiment.SCHEDULES["c1"], "ranks": 4, "steps_per_epoch": 2,
        "divisor": 250.0, "seeds": 2, "settings": ["dense", "topk(k=0.1)+ef(vanilla)/allgather", "flexcomm"], "target": 60.0, "resume": True, "planner": "",
    }


def result(setting, seed, accuracy, decisions=()):
    return {
        "setting": setting, "seed": seed, "seconds": 20.0 + seed, "accuracy": accuracy, "bytes": 3_000_000,
        # On all test images.
        "final": accuracy[-1][1] + 1.0,
        "phase_ms": [10.0, 20.0, 30.0, 40.0], "decisions": list(decisions),
    }


def test_it_runs_only_what_is_missing(experiment, plan, tmp_path):
    experiment.result_file(tmp_path, "topk(k=0.1)+ef(vanilla)/allgather", 0).write_text("{}")
    assert experiment.missing(plan, plan["settings"][:2]) == [("dense", 0), ("dense", 1), ("topk(k=0.1)+ef(vanilla)/allgather", 1)]


def test_results_of_another_experiment_are_not_mixed_in(experiment, plan, tmp_path):
    kept = experiment.result_file(tmp_path, "dense", 0)
    kept.write_text("{}")
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    experiment.keep_or_drop(plan | {"settings": ["dense"], "target": 70.0}, tmp_path)
    assert kept.exists()
    with pytest.raises(SystemExit, match="another experiment"):
        experiment.keep_or_drop(plan | {"steps_per_epoch": 3}, tmp_path)
    experiment.keep_or_drop(plan | {"resume": False}, tmp_path)
    assert not kept.exists()


def test_the_table_has_means_over_seeds_and_what_has_not_run(experiment, plan):
    results = [
        result("dense", 0, [(5.0, 50.0), (10.0, 61.0)]), result("dense", 1, [(6.0, 62.0), (12.0, 63.0)]),
        result("flexcomm", 0, [(5.0, 50.0), (9.0, 55.0)], [(7, "1 topk(k=0.1)+ef(vanilla)/allgather")]),
    ]
    lines = experiment.table(plan, results).splitlines()
    # Reached at 10 s and at 6 s, in the end 62 and 64 %, after 20 and 21 s.
    assert "| dense | 2 | 8.0 ± 2.8 | 63.0 ± 1.4 | 20.5 ± 0.7 | 3.0 | 10 | 20 | 30 | 40 | 0 |" in lines
    assert any(line.startswith("| flexcomm | 1 | never | 56.0 |") and line.endswith("| 1 |") for line in lines)
    assert any(line.startswith("| topk(k=0.1)+ef(vanilla)/allgather | 0 | not run") for line in lines)
    heads = {line.count("|") for line in lines if line.startswith("|")}
    assert len(heads) == 1, "every line has as many cells"
    assert lines[-1] == "flexcomm, seed 0: step 7: 1 topk(k=0.1)+ef(vanilla)/allgather"
    assert experiment.plot(results).count("<polyline") == 3
