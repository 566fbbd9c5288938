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


CELLS = SCRIPT.parents[2] / "suite" / "reality"


def test_the_cells_are_played_and_what_is_not_is_refused(experiment, tmp_path):
    paths = sorted(CELLS.glob("*.toml"))
    cells = [experiment.read_cell(path) for path in paths if path.name != "uml.toml"]
    assert len(cells) == 6 and sum(cell["phase_s"] >= 60 for cell in cells) >= 3
    assert cells[0]["name"] == paths[0].stem
    text = (CELLS / "slow-node.toml").read_text()
    for old, new, why in (
        ("pause = 0.0", "pause = 1.0", "stragglers"), ("values_factor = 1.0", "values_factor = 2.0", "values_factor"),
        ("nic = 2", "nic = 2\ncompetitors = 1", "competitors"), ('"perceptron"', '"convolutional"', "convolutional"),
    ):
        bad = tmp_path / "bad.toml"
        bad.write_text(text.replace(old, new, 1))
        with pytest.raises(SystemExit, match=why):
            experiment.read_cell(bad)


def test_a_phase_limits_both_ways_and_a_slow_node_is_slow_for_all(experiment):
    phase = {"latency_ms": 2.0, "up_mbit": 10.0, "down_mbit": 40.0, "nic": [{"nic": 1, "bandwidth_factor": 0.5, "latency_factor": 3.0}]}
    lines = experiment.shaping(phase, 3)
    assert sorted(lines) == [0, 1, 2, 3]
    assert [line.split("rate ")[1].split()[0] for line in lines[1][:1] + lines[2][:1]] == ["10000000bit", "5000000bit"]
    assert "delay 2000us" in lines[1][1] and "delay 6000us" in lines[2][1]
    towards = {line.split()[3]: line for line in lines[0] if "netem" in line}
    assert "delay 0us" in towards["p1"] and "delay 4000us" in towards["p2"], "with the sender's: three times 2 ms"
    assert any("p2" in line and "rate 20000000bit" in line for line in lines[0])


def test_a_cells_seeds_count_and_its_table_is_written(experiment, plan, tmp_path):
    plan |= {"cell": {"name": "c1", "world": 4, "steps": 100, "seeds": [1, 7]}, "settings": ["none/dense-ring", "flexcomm"]}
    assert experiment.missing(plan, ["none/dense-ring"]) == [("none/dense-ring", 1), ("none/dense-ring", 7)]
    run = {"setting": "none/dense-ring", "seconds": 20.0, "losses": [2.0, 0.5], "final": 80.0, "bytes": 5_000_000, "decisions": []}
    lines = experiment.cell_table(plan, [run, run | {"seconds": 30.0, "losses": [2.0, 0.7]}]).splitlines()
    assert "| none/dense-ring | 2 | 25.0 ± 7.1 | 250.0 | 0.600 | 80.0 ± 0.0 | 5.0 | 0 |" in lines
    assert lines[-1].startswith("| flexcomm | 0 | not run")
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_cells_compute_as_long_as_the_machine(experiment, tmp_path):
    cell = tmp_path / "c.toml"
    cell.write_text("steps = 1\ncompute_s = 0.05\n")
    experiment.calibrate.set_compute(tmp_path, 0.01)
    assert cell.read_text() == "steps = 1\ncompute_s = 0.010000\n"
