"""Methods of several rounds, three ranks: the hook waits for none of them before backward is over, and all ranks launch them in
the same order."""

import pytest
from conftest import torchrun
from flexcomm.torch._pass import _launch_later_rounds

ROUNDS = {"one round": 1, "powersgd": 2, "star": 2, "var": 3, "sizes": 2}


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("rounds.py", folder, ranks=3)
    assert done.code == 0, done.text
    return done.ranks()


@pytest.mark.parametrize("name", ROUNDS)
def test_first_rounds_are_launched_by_bucket_and_all_others_after_the_last_bucket(seen, name):
    for rank in seen:
        log = [tuple(event) for event in rank[name]["log"]]
        buckets = 1 + max(bucket for _, bucket, _ in log)
        assert buckets > 2 and rank[name]["alike"] and rank[name]["equal"]
        expected = [(what, bucket, 0) for bucket in range(buckets) for what in ("launch", "return")][:-1]
        for number in range(1, ROUNDS[name]):
            for bucket in range(buckets):
                expected += [("wait", bucket, number - 1), ("launch", bucket, number)]
        expected += [("wait", bucket, ROUNDS[name] - 1) for bucket in range(buckets)]
        assert log == [*expected, ("return", buckets - 1, 0)]


def test_where_a_later_round_fails_none_follows_and_all_under_way_are_waited_for():
    class Fake:
        def __init__(self, fails: bool) -> None:
            self.fails, self.rounds, self.waits = fails, 0, 0

        def next_round(self) -> bool:
            if self.fails:
                raise RuntimeError("the peer is gone")
            self.rounds += 1
            return True

        def wait(self) -> None:
            self.waits += 1
            raise RuntimeError("this one, too")

    exchanges = [Fake(False), Fake(True), Fake(False)]
    with pytest.raises(RuntimeError, match="the peer is gone"):
        _launch_later_rounds(exchanges)
    assert [(fake.rounds, fake.waits) for fake in exchanges] == [(1, 1), (0, 1), (0, 1)]
