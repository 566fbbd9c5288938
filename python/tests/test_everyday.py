"""Ordinary loops around `attach`, two ranks."""

import pytest
from conftest import torchrun


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("everyday.py", folder, ranks=2)
    assert done.code == 0, done.text
    return done.ranks()


def test_batches_have_the_loaders_length_and_can_be_closed(seen):
    for rank in seen:
        assert rank["lengths"] == {
            "length": 5, "seen": [8] * 5, "within": True, "closed": True, "stream": "TypeError", "of stream": 5, "steps": 5,
        }


def test_a_wrapper_of_an_optimizer_tells_its_steps_and_the_log_what_runs(seen):
    for number, rank in enumerate(seen):
        wrapped = rank["wrapped"]
        assert wrapped["steps"] == 5 and wrapped["known"]
        said = [line for line in wrapped["lines"] if "no agent" in line]
        assert [("staying with topk(k=0.1)+ef(vanilla)/allgather" in line, "dense" in line) for line in said] == [(True, False)] * (number == 0), said


@pytest.mark.parametrize("name", ["gather", "star", "text"])
def test_gradients_that_a_script_throws_away_are_spoken_of_once(seen, name):
    for number, rank in enumerate(seen):
        leaks, right = rank[name]
        # The last pass without a step has not ended yet.
        assert leaks == {"equal": True, "steps": [12, 23], "warned": int(number == 0)}
        assert right == {"equal": True, "steps": [12, 12], "warned": 0}


def test_a_second_hook_is_refused_with_the_remedy(seen):
    for rank in seen:
        for (kind, text), there in zip(rank["again"], ("flexcomm_hook", "fp16_compress_hook"), strict=True):
            assert kind == "FlexcommError" and there in text and "register=False" in text, text


def test_a_session_calls_a_strategy_what_the_user_did(seen):
    for rank in seen:
        said = rank["named"]["said"]
        assert said == {
            "fp16": "fp16/dense-ring", "bf16": "bf16/dense-ring", "fp16+ef(vanilla)": "fp16+ef(vanilla)/dense-ring",
            "dense": "none/dense-ring",
            "topk(k=0.1)+ef(vanilla)/allgather": "topk(k=0.1)+ef(vanilla)/allgather",
        }, said
        words = ["did you mean topk?", "strategies is 5", "'none/dense-ring' has no shadow"]
        for (kind, text), word in zip(rank["named"]["shadows"], words, strict=True):
            assert kind == "ValueError" and word in text, text


def test_an_attached_model_can_be_compiled(seen):
    for rank in seen:
        assert len(rank["compiled"]) == 5
        for name, found in rank["compiled"].items():
            assert found == {"steps": [10, 10], "close": True, "equal": True, "compiled": True}, (name, found)
