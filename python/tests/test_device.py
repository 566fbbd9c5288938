"""Buckets on a GPU, without one: which path is taken and why, and the whole path over a stand-in for the CUDA driver that
runs the kernels' own source (gpu-kernels/tests/emulator/driver.cpp)."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from conftest import torchrun

KERNELS = pathlib.Path(__file__).parents[2] / "gpu-kernels"


@pytest.fixture(scope="module")
def standin(tmp_path_factory):
    """A folder with a libcuda.so.1, and the environment in which the kernels load: compiled once for all ranks."""
    if shutil.which("g++") is None or not KERNELS.exists():
        assert os.environ.get("FLEXCOMM_NO_SKIP") != "1", "there is no g++"
        pytest.skip("there is no g++, or no gpu-kernels/, to build a stand-in for the driver from")
    folder = tmp_path_factory.mktemp("driver")
    source = KERNELS / "tests/emulator"
    flags = "-std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing -shared -fPIC -DFLEXCOMM_EMULATOR".split()
    subprocess.run(
        ["g++", *flags, "-I", KERNELS / "cuda", "-I", source, source / "driver.cpp", "-o", folder / "libcuda.so.1"],
        check=True,
    )
    return {"LD_LIBRARY_PATH": str(folder), "FLEXCOMM_KERNEL_CACHE": str(folder / "kernels")}


def why(**env):
    """What a process of its own says of the kernels."""
    code = """import sys, flexcomm.torch._device as d
d._point_at_nvrtc()
try:
    d.Core.load_kernels(int(sys.argv[1]))
except d.NotOnDeviceError as why:
    print(why)
"""
    full = {k: v for k, v in os.environ.items() if not k.startswith("FLEXCOMM_")} | {"STANDIN_COMPILES": "1"} | env
    ordinal = full.pop("ORDINAL", "0")
    done = subprocess.run([sys.executable, "-P", "-c", code, ordinal], env=full, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_why_there_are_no_kernels(standin, tmp_path):
    assert why(**standin) == ""
    # The second time from the cache: with a compiler that is none.
    assert "libcuda.so.1" in why(LD_LIBRARY_PATH=str(tmp_path)) or os.path.exists("/dev/nvidia0")
    assert "too old" in (old := why(**standin, STANDIN_VERSION="11000")) and "11.0" in old
    assert "CUDA device 1" in why(**standin, ORDINAL="1")
    assert why(**standin, FLEXCOMM_GPU_KERNELS="0") == "FLEXCOMM_GPU_KERNELS is 0"
    assert "find NVRTC" in why(**standin, FLEXCOMM_NVRTC=str(tmp_path / "nothing.so"))


@pytest.fixture(scope="module")
def seen(folder, standin):
    assert why(**standin) == ""
    done = torchrun("device.py", folder, ranks=3, **standin)
    assert done.code == 0, done.text
    return done.ranks()


def test_the_device_has_the_bits_of_the_host(seen):
    for rank, own in enumerate(seen):
        assert own["driver"]
        want = own["host"]
        assert want["equal"] and want["launched"] == 0 and want["waited"] == 0 and not want["lines"]
        for name in ("device", "mixed", "checkpoint", "shadow", "refused"):
            got = own[name]
            assert got["hash"] == want["hash"], (name, got, want)
            assert abs(got["gain"] - want["gain"]) < 1e-6 and got["sent"] == want["sent"], (name, got, want)
        device = own["device"]
        # On the caller's stream; one wait in each of the nine steps that compress, whatever the number of buckets.
        # Five launches to select, of which one correction of the word, and one for each of three messages.
        assert device["launched"] % (9 * 8) == 0 and device["launched"] > 9 * 8, device
        assert device["waited"] == 9 and not device["lines"], device
        assert (own["mixed"]["launched"] == 0) == (rank == 0)
        assert own["checkpoint"]["launched"] == device["launched"]


def check_reports(own, lag):
    """Every step once the buckets have settled, in order, but for the last ones, whose times come too late; by the device's
    clock if it lags, else by the host's."""
    assert own["slower"] > 10 if lag > 1 else own["slower"] < 2, own["slower"]
    steps = own["steps"]
    numbers = [step for _, _, step in steps]
    assert numbers == list(range(3, numbers[-1] + 1)), numbers
    assert own["at"] - lag <= numbers[-1] < own["at"], (numbers[-1], own["at"])
    assert own["sane"] and own["synchronised"] == 0 and own["equal"], own
    assert all(part >= 0 for part in own["costs"]) and own["costs"][4] > 0


def test_steps_that_a_device_did_are_reported_late_and_in_order(seen):
    for own in seen:
        check_reports(own["reported host"], 1)
        check_reports(own["reported wrapped"], 16)
        got = own["reported"]
        check_reports(got, 16)
        # Nothing of version 1 before it was said to be in force, and nothing of version 0 after that.
        assert [kind for kind, _ in got["order"]].count("applied") == 1
        at = got["order"].index(["applied", 1])
        assert {version for _, version in got["order"][:at]} == {0} and {version for _, version in got["order"][at:]} == {1}
        assert {(version, compressor) for version, compressor, _ in got["steps"]} == {(0, "none"), (1, "topk")}
        # Used again: far fewer are made than recorded.
        assert 0 < got["made"] < got["recorded"] / 2, got
        assert not any("not reported" in line for line in got["lines"]), got["lines"]


def test_a_trials_iterations_are_told_late_and_its_report_waits_for_them(seen):
    for own in seen:
        own = own["tried"]
        # Its shadows complete it later.
        report, *_ = own["trials"]
        assert own["in trial"] == 12 and own["at its end"] == 0 and own["equal"]
        assert [outcome["iterations"] for outcome in report["outcomes"]] == [4, 4, 4]
        dense, topk, art = report["outcomes"]
        assert dense["comp_us"] == 0 and topk["comp_us"] > 0 and dense["gain"] == 1 and 0 < topk["gain"] < 1
        # By the device's clock, which lags; and by the host's, where the host takes turns with its collectives.
        assert 4 * (dense["sync_us"] + topk["sync_us"]) > report["cost_us"] > 4 * art["sync_us"] > 0
        # Steps before and after it in order, and none twice.
        steps = [step for _, steps in own["received"] for step in steps]
        assert steps == list(range(3, steps[-1] + 1)) and steps[-1] > 20, own["received"]


def test_shadows_look_at_gradients_where_they_are_and_wait_for_nothing(seen):
    for own in seen:
        assert own["shadow"]["launched"] > own["device"]["launched"] and not own["shadow"]["lines"]
        for strategy in ("dense", "topk(k=0.05)+ef(vanilla)/allgather"):
            runs = own[f"shadows {strategy}"]
            host, device, late, halves = (runs[name] for name in ("host", "device", "late", "halves"))
            assert {run["hash"] for name, run in runs.items() if name != "halves"} == {host["hash"]}
            # Dense begins a step later: DDP gets the hook first.
            steps = 29 if strategy == "dense" else 30
            assert host["steps"] == device["steps"] == steps and host["gains"] == pytest.approx(device["gains"], rel=1e-12)
            # Their numbers come later, without a wait of their own: dense has none, and top-k one per step as ever.
            assert steps - 8 <= late["steps"] < steps and late["gains"] == pytest.approx(host["gains"], rel=0.05)
            assert halves["gains"] == pytest.approx(host["gains"], rel=0.05) and halves["steps"] == steps
            for run in (device, late, halves):
                assert not run["lines"] and run["launched"] > steps * 4 * 4, run
                assert run["waited"] == (0 if strategy == "dense" else 37), run
            # Where there is no memory, or a kernel fails: on the host, from the beginning, one step later.
            for name, left in (("full", steps - 1), ("fails", 19)):
                run = runs[name]
                assert run["steps"] == left and run["gains"] == pytest.approx(host["gains"], rel=0.3), (name, run)
                said = "shadow trials look at copies on the host of buckets on cpu: "
                (line,) = [line for line in run["lines"] if said in line]
                assert ("out of memory" if name == "full" else "failed to launch cut_third") in line


def test_no_rank_goes_into_a_trial_whose_snapshot_one_has_no_memory_for(seen):
    for rank, own in enumerate(seen):
        with_trials, without = own["snapped"]
        assert with_trials["hashes"] == without["hashes"] and len(without["hashes"]) == 77
        # The first and the last were refused, by all ranks; the others ran when there was memory again.
        assert with_trials["inside"] == 2 * 2 * 4
        for number in "14" if rank == 0 else "":
            aborted, outcomes = with_trials["reports"][number]
            assert not any(outcomes) and aborted.startswith("rank 1: ")
            assert ("a snapshot of" if number == "1" else "Tried to allocate 5.00 GiB.; take") in aborted
        assert [with_trials["reports"][n] for n in "23"] == [[None, [4, 4]]] * 2
        # Parameters, gradients, both of Adam's moments and its steps: more than the device has, the rest is the host's.
        on_gpu, on_host = with_trials["taken"][0]
        assert 4 * 4 * with_trials["parameters"] > on_gpu == 9984 and on_host == 1 << 20
        assert len(set(map(tuple, with_trials["taken"]))) == 1 and with_trials["left"] == 0
        refused = [line for line in with_trials["lines"] if "this job cannot run live trials: rank 1: " in line]
        assert len(refused) == (2 if rank == 0 else 0), with_trials["lines"]
        assert not refused or "a snapshot of" in refused[0] and "Tried to allocate 5.00 GiB.; take" in refused[1]
        taken = [line for line in with_trials["lines"] if "live trial's snapshot takes 9984 bytes of GPUs' memory" in line]
        assert len(taken) == 1, with_trials["lines"]
        assert not any("not pinned" in line for line in with_trials["lines"])


def test_the_host_steps_in_and_says_why(seen):
    for rank, own in enumerate(seen):
        lines = own["refused"]["lines"]
        if rank == 1:
            (line,) = lines
            assert "failed to launch cut_third: the CUDA driver says CUDA_ERROR_LAUNCH_FAILED" in line
        assert rank == 1 or not lines, lines
        for text, (host, device) in own["others"].items():
            assert host["hash"] == device["hash"] and device["equal"], text
            assert own["carried"][text]["hash"] == host["hash"], text
            if "signum" in text:
                assert device["launched"] == 0, text
                assert len(device["lines"]) == 1 and "kernels" in device["lines"][0], device["lines"]
            else:
                assert device["launched"] > 0 and not device["lines"], (text, device)
        host, _ = own["others"]["qsgd(s=64)+ef(vanilla)"]
        assert own["text checkpoint"]["hash"] == own["text mixed"]["hash"] == host["hash"]
        assert (own["text mixed"]["launched"] == 0) == (rank == 0)
        for dtype in ("bfloat16", "float16"):
            assert all(run["equal"] and run["launched"] > 0 for run in own[f"text torch.{dtype}"])


def test_a_device_without_memory_leaves_it_to_the_host_and_no_rank_differs(seen):
    for rank, own in enumerate(seen):
        assert len(own["full"]) == 14
        for name, got in own["full"].items():
            assert got["equal"] and got["hash"] == own["roomy"][name.rpartition(", ")[0]], name
            if rank != 1:
                assert not got["lines"] and got["full"] > 0, (name, got)
                continue
            # One line with cause and remedy, nothing launched in vain, and again by kernels when there is memory.
            (line,) = got["lines"]
            assert "compressed on the host: cpu has no memory left" in line and "out of memory" in line, line
            assert "Take a smaller batch" in line and "\n" not in line
            # One bucket in float32 whose messages cross to the host needs no more than that one piece.
            partly = (name.startswith("qsgd") or "art-ring" in name) and name.endswith("float32, later")
            assert (got["full"] > 0) == partly and got["full"] < got["launched"], (name, got)


def test_a_rank_without_kernels_sends_by_the_backend_of_the_others(seen):
    for rank, own in enumerate(seen):
        for text, got in own["two backends"].items():
            assert got["by host"] == 0 and got["hash"] == seen[0]["two backends"][text]["hash"], (text, got)
        topk = own["two backends"]["topk(k=0.05)+ef(vanilla)/allgather"]
        assert topk["hash"] == own["host"]["hash"]
        assert any("cut_third" in line for line in topk["lines"]) == (rank == 1), topk["lines"]
        # The kernels' collectives; the copies' are waited for on the current stream.
        assert topk["beside"] > 0


def test_halves_and_mstopk_are_equal_on_all_ranks(seen):
    for own in seen:
        assert own["mstopk"]["equal"] and own["mstopk"]["launched"] > 9 * 8 and not own["mstopk"]["lines"]
        for name in ("bfloat16", "float16"):
            device, host = own[f"{name} device"], own[f"{name} host"]
            assert device["equal"] and device["launched"] > 9 * 7 and not device["lines"]
            assert device["hash"] == host["hash"]


def test_a_gradient_that_is_not_finite_is_known_everywhere(seen):
    for own in seen:
        assert own["raise"]["error"] == "NotFiniteError" and own["raise"]["kept"] and own["raise"]["launched"] > 0
        assert own["propagate"]["error"] is None and own["propagate"]["kept"] and own["propagate"]["nan"]


def test_rank_0_measures_what_compressing_takes_on_the_device(seen):
    """By the stand-in's clock, which launches and copies move."""
    first, *others = seen
    times = first["measured"]["times"]
    kernels = {name: own for name, own in times.items() if own is not None}
    # PowerSGD has no kernels.
    assert set(times) - set(kernels) == {"none", *(f"powersgd(rank={rank})+ef(vanilla)" for rank in (1, 2, 4))}
    for name, own in kernels.items():
        assert 0 < own["compress_value_s"] < 1e-3 and 0 < own["decompress_value_s"] < 1e-3, (name, own)
        # Of what stays on the device and has a ratio longer messages take longer copies.
        assert (own["compress_kept_s"] > 0) == (name in ("topk(k=*)+ef(vanilla)", "mstopk(k=*)+ef(vanilla)")), (name, own)
    assert not any(any(own["measured"]["times"].values()) for own in others)
    assert not any(any(own["measured host"]["times"].values()) for own in seen)
    for name, why in (("measured off", "FLEXCOMM_GPU_KERNELS is 0"), ("measured fails", "failed to launch cut_third")):
        assert not any(first[name]["times"].values()), name
        (line,) = [line for line in first[name]["lines"] if "was not measured" in line]
        assert why in line
    assert not any("was not measured" in line for own in seen for line in own["measured"]["lines"])


def test_without_a_driver_the_host_compresses(tmp_path):
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU here")
    done = torchrun("device.py", tmp_path, ranks=2)
    assert done.code == 0, done.text
    for own in done.ranks():
        assert not own["driver"]
        assert own["host"]["hash"] == own["device"]["hash"] and own["device"]["equal"]
        assert not any(own["measured"]["times"].values())
        (line,) = own["device"]["lines"]
        assert "compressed on the host: failed to load the CUDA driver: there is no libcuda.so.1 here" in line
