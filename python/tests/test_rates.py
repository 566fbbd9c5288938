"""Learning rates are read once a step. Needs neither torch nor the built core."""

import importlib.util
import pathlib
from types import SimpleNamespace

_PATH = pathlib.Path(__file__).parent.parent / "flexcomm" / "torch" / "_rates.py"
_SPEC = importlib.util.spec_from_file_location("_rates", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
rates = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(rates)


class Rate:
    """Counts how often it is read, as a tensor on a GPU would be waited for."""

    read = 0

    def __init__(self, value):
        self.value = value

    def __float__(self):
        Rate.read += 1
        return self.value


def test_each_group_is_read_once_a_step_however_many_buckets_ask():
    one, other, foreign = object(), object(), object()
    groups = [{"params": [one], "lr": Rate(0.1)}, {"params": [other], "lr": Rate(0.2)}]
    step = rates.Rates(SimpleNamespace(param_groups=groups))
    for swapped in (False, True):
        if swapped:
            groups[0]["params"], groups[1]["params"] = [other], [one]
        Rate.read = 0
        step.begin()
        for _ in range(50):
            asked = step.of([id(one), id(other), id(foreign)])
        assert asked == [0.1, *((0.2, 0.1) if swapped else (0.1, 0.2)), 0.0]
        assert Rate.read == 2
    Rate.read = 0
    step.begin()
    assert Rate.read == 0, "none was asked for"


def test_one_group_or_none_has_one_rate():
    one = object()
    assert rates.Rates(None).of([id(one)]) == [0.0]
    assert rates.Rates(SimpleNamespace(param_groups=[{"params": [one], "lr": 0.5}])).of([id(one)]) == [0.5]


def test_the_largest_momentum_of_all_groups_counts():
    def momentum(*groups):
        return rates.Rates(SimpleNamespace(param_groups=list(groups))).momentum()

    assert momentum({"momentum": 0.9}, {"momentum": 0.5}) == 0.9
    assert momentum({"momentum": 0}) == 0.0
    assert momentum({"betas": (0.95, 0.999)}) == 0.95
    assert momentum({"lr": 0.1}) == 0.0, "an optimizer that has none"
    assert momentum({"momentum": 1.5}) is None, "what the controller would refuse"
    assert momentum({"momentum": None}, {"betas": ()}, {"betas": 0.9}) is None, "an optimizer with names of its own"
    assert rates.Rates(None).momentum() is None
