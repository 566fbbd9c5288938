#!/usr/bin/env python3
"""Races our search against pymoo's compiled NSGA-II on one 60-bucket problem, in one run on one machine.

    python3 -m venv /tmp/venv-pymoo && /tmp/venv-pymoo/bin/pip install pymoo==0.6.1.6
    cargo build --release -p flexcomm-optimizer --example pymoo_race
    /tmp/venv-pymoo/bin/python optimizer/benches/pymoo_compare.py target/release/examples/pymoo_race

Per seed: pymoo runs population 100 x 100 generations; the hypervolume of its result is the target, and our
time is what a whole search takes that reaches it, of at least one generation after its first population of
exact solutions of weighted sums. Beside it: that first population alone, the same operators from a random first
population, and our 100 generations. Both sides see the same tables and the same reference point.
The exit status is 1 when the mean over the seeds is below 50 times sooner.
"""
import json
import subprocess
import sys
import tempfile
import time

import numpy as np
from pymoo.algorithms.moo.nsga2 import NSGA2
from pymoo.core.problem import Problem
from pymoo.functions import is_compiled
from pymoo.indicators.hv import HV
from pymoo.optimize import minimize

SEEDS = range(1, 8)
LEAST = 50  # times sooner than pymoo, the mean over the seeds


class Buckets(Problem):
    """One gene per bucket and one for the collective, in [0, 1), cut into equal cells."""

    def __init__(self, cells):
        self.cells = np.asarray(cells)  # [collective][bucket][level][t_comp, t_sync, kept]
        self.shape = self.cells.shape[:3]
        self.buckets = np.arange(self.shape[1])
        super().__init__(n_var=self.shape[1] + 1, n_obj=3, xl=0.0, xu=1.0)

    def _evaluate(self, x, out, *args, **kwargs):
        collectives, _, levels = self.shape
        collective = np.minimum((x[:, -1] * collectives).astype(int), collectives - 1)
        level = np.minimum((x[:, :-1] * levels).astype(int), levels - 1)
        total = self.cells[collective[:, None], self.buckets[None, :], level].sum(axis=1)
        total[:, 2] = 1.0 / total[:, 2]
        out["F"] = total


def reference_point(cells):
    """Just beyond the worst that any plan can be, collective by collective."""
    worst = cells.max(axis=2).sum(axis=1).max(axis=0)
    least_kept = cells[..., 2].min(axis=2).sum(axis=1).min()
    return np.array([worst[0] * 1.01, worst[1] * 1.01, 1.01 / least_kept])


def main():
    ours = sys.argv[1]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([ours, "problem", file.name], check=True)
        cells = np.asarray(json.load(open(file.name))["cells"])
    reference = reference_point(cells)
    problem = Buckets(cells)
    print(f"pymoo compiled: {is_compiled()}; {cells.shape[1]} buckets, reference point {reference}")
    if not is_compiled():
        sys.exit("pymoo runs without its compiled modules: the comparison would not be fair")
    print("| seed | pymoo 100 gen. s | its hypervolume | ours s | generations | times sooner | first population s "
          "| its hypervolume | random start s | generations | times sooner | ours 100 gen. s | its hypervolume |")
    print("|" + "---|" * 13)
    ratios, random_ratios = [], []
    for seed in SEEDS:
        begin = time.perf_counter()
        result = minimize(problem, NSGA2(pop_size=100), ("n_gen", 100), seed=seed, verbose=False)
        seconds = time.perf_counter() - begin
        target = HV(ref_point=reference)(result.F)
        command = [ours, "run", repr(float(target)), *(repr(float(v)) for v in reference), str(seed)]
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        first, exact, random, full = (answer[k] for k in ("first", "exact", "random", "full"))
        if exact is None:
            sys.exit(f"seed {seed}: never reached {target}")
        ratios.append(seconds / exact["seconds"])
        from_random = "never | | "
        if random:
            random_ratios.append(seconds / random["seconds"])
            from_random = f"{random['seconds']:.4f} | {random['generations']} | {random_ratios[-1]:.1f}"
        print(f"| {seed} | {seconds:.3f} | {target:.5f} | {exact['seconds']:.5f} | {exact['generations']} "
              f"| {ratios[-1]:.0f} | {first['seconds']:.6f} | {first['hypervolume']:.5f} | {from_random} "
              f"| {full['seconds']:.4f} | {full['hypervolume']:.5f} |")
    print(f"mean of {len(ratios)} seeds: {np.mean(ratios):.0f} times sooner (least {min(ratios):.0f})")
    if random_ratios:
        print(f"from a random start, reached by {len(random_ratios)} of {len(ratios)}: "
              f"{np.mean(random_ratios):.1f} times sooner")
    if np.mean(ratios) < LEAST:
        sys.exit(f"the mean is {np.mean(ratios):.1f} times sooner, promised are {LEAST}")


if __name__ == "__main__":
    main()
