"""Bad input ends in the same clear error on every rank at the same step, or in a fallback on all of them."""

import pytest
from conftest import torchrun
from flexcomm import _core
from flexcomm._core import Status
from flexcomm.torch._failures import _whose

STRATEGIES = ["topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/art-ring:star", "topk(k=0.1)+ef(vanilla)/art-ring:var"]


@pytest.fixture(scope="module")
def seen(folder):
    done = torchrun("bad.py", folder)
    assert done.code == 0, done.text
    return done.ranks()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_on_one_rank_is_an_error_on_all_at_the_same_step(seen, strategy):
    for rank in seen:
        kind, text, steps, _, equal = rank[f"nan {strategy}"]
        assert kind == "NotFiniteError" and "NaN" in text and "GradScaler" in text
        assert steps == 7 and equal


@pytest.mark.parametrize("strategy", [*STRATEGIES, "qsgd", "batches", "unused"])
def test_a_batch_with_a_nan_can_be_left_out(seen, strategy):
    for rank in seen:
        assert rank[f"go on {strategy}"] == {"left out": [7, 12], "equal": True, "finite": True, "steps": 14}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_can_propagate_and_leaves_the_residual(seen, strategy):
    for rank in seen:
        kind, text, steps, (unchanged, all_nan), equal = rank[f"propagate {strategy}"]
        assert (kind, steps, all_nan, equal) == (None, 12, True, True), text
        # AR-Topk has taken values before it knows; the difference is a rounding.
        assert unchanged or "art" in strategy


def test_a_rank_that_fails_in_a_pass_with_a_nan_leaves_no_other_waiting(seen):
    found = [rank["fails alone"] for rank in seen]
    assert found[1] == ["RuntimeError", "rank 1 alone", 7]
    assert [(kind, steps) for kind, _, steps in found[:1] + found[2:]] == [("NotFiniteError", 7)] * 3


@pytest.mark.parametrize(
    "strategy", ["topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/art-ring:star", "powersgd(rank=2)+ef(vanilla)", "fp16+ef(vanilla)"]
)
def test_a_codec_that_fails_ends_the_step_on_all_ranks_with_its_rank_and_reason(seen, strategy):
    for rank in seen:
        kind, text, steps = rank[f"codec {strategy}"]
        assert kind == "FlexcommError" and "rank 2 could not do its part: " in text and "values" in text, text
        assert steps == 7


def test_two_backward_passes_in_one_batch_are_refused_on_all_ranks_at_once(seen):
    for rank in seen:
        for once, error in rank["twice"]:
            assert once == [None, "", 6, 7, True]
            kind, text, batches = error
            assert kind == "FlexcommError" and "no_sync()" in text and "second synchronised backward pass" in text and "close() it" in text, error
            assert batches == 4


def test_sparse_gradients(seen):
    for rank in seen:
        attached, later = rank["sparse"]
        assert attached[0] == "FlexcommError" and "words" in attached[1] and "sparse=False" in attached[1]
        assert later[0] == "FlexcommError" and "sparse gradient" in later[1] and "sparse=False" in later[1] and later[2] == 0


def test_complex_parameters_are_refused_at_once(seen):
    for rank in seen:
        (kind, text, _), frozen = rank["complex"]
        assert kind == "FlexcommError" and "turn" in text and "complex64" in text and "view_as_complex" in text, text
        assert frozen == [None, "", 0]


def test_a_model_has_one_session_until_it_is_closed(seen):
    for number, rank in enumerate(seen):
        found = rank["two sessions"]
        for name, who in (("again", "rank 0"), ("alone", "rank 2")):
            kind, text, _ = found[name]
            assert kind == "FlexcommError" and who in text and "has a session already" in text and "close()" in text, text
        for kind, text, _ in found["refused"]:
            assert kind == "FlexcommError" and "the session is closed" in text and "attach to the model anew" in text, text
        assert found["freed"] == [[None, "", 0], 0] and found["forgotten"] == [None, "", 0]
        state = "agent not connected" if number == 2 else "closed"
        name = f"<flexcomm session of rank {number} of 4: step 0, none/dense-ring, "
        assert found["names"] == [f"{name}{state}>", f"{name}closed>"]


def test_a_loss_that_is_no_number_is_refused(seen):
    for rank in seen:
        for name, words in {"None": "loss is None", "two": "loss is tensor([1., 1.])", "text": "loss is '0.5'"}.items():
            kind, text, _ = rank["losses"][name]
            assert kind == "ValueError" and words in text and "tensor of one value" in text, text
        assert rank["losses"]["one"] == rank["losses"]["whole"] == [None, "", 0]


@pytest.mark.parametrize("dtype", ["bf16", "float64"])
def test_other_element_types_fall_back_on_all_ranks_and_it_is_said(seen, dtype):
    assert len(seen[0][dtype]["lines"]) == 1
    for rank in seen:
        assert rank[dtype]["equal"] and rank[dtype]["residual"] == 0


def test_ranks_with_different_models_or_settings(seen):
    for rank in seen:
        for kind, text, _ in rank["models"]:
            assert kind == "FlexcommError" and "differs between ranks" in text
        assert "the model" in rank["models"][0][1] and "rank 3" in rank["models"][0][1]
        assert "the strategy" in rank["models"][1][1] and "rank 1" in rank["models"][1][1]


def test_ranks_of_different_releases_are_told_apart(seen):
    own, before = (f"{_core.VERSION} (protocol {protocol})" for protocol in (_core.PROTOCOL, 1))
    for rank in seen:
        kind, text, _ = rank["releases"]
        assert kind == "FlexcommError" and "the flexcomm version differs between ranks" in text, text
        assert f"'{own}' on rank 0, '{before}' on rank 2" in text, text


def test_the_job_is_named_alike_on_all_ranks(seen):
    for rank in seen:
        launched, given, (kind, text) = rank["names"]
        assert (launched, given) == ("slurm-77", "mine")
        assert kind == "FlexcommError" and "'one' on rank 1, 'three' on rank 3" in text and "FLEXCOMM_JOB" in text, text


def test_arguments_are_refused_with_the_remedy(seen):
    expected = {
        "strategy": "compressor", "selection": "star", "nonfinite": "propagate", "unwrapped": "DistributedDataParallel",
        "scheduler": "state_dict", "job": "characters", "compiled": "then torch.compile it",
    }
    for rank in seen:
        for name, word in expected.items():
            kind, text, _ = rank["arguments"][name]
            assert kind in ("ValueError", "FlexcommError") and word in text, (name, kind, text)


def test_arguments_of_one_rank_are_refused_on_all(seen):
    expected = {
        "strategy": "compressor", "selection": "star", "job": "characters", "nonfinite": "propagate", "scheduler": "state_dict",
        "share": "shadow_share", "seed": "seed is -1", "sparse": "sparse=False",
        "optimizer": "torch.optim.Optimizer", "raw": "DistributedDataParallel", "raw in a group": "DistributedDataParallel",
        "compiled in a group": "then torch.compile it",
    }
    for rank in seen:
        assert rank["arguments of one"].keys() == expected.keys()
        for name, word in expected.items():
            kind, text, _ = rank["arguments of one"][name]
            # A name that one rank gives is all ranks' name.
            who = "rank 0" if name == "job" else "rank 2"
            assert kind in ("ValueError", "FlexcommError") and word in text and who in text, (name, kind, text)


#: What an error must name: the value as given, what is allowed, and the remedy where that is more.
WRONG_KINDS = {
    "number": ["strategy is 0.1", "topk(k=0.01)+ef(vanilla)/art-ring:star", "flexcomm.torch.compressors()"],
    "initial": ["initial is ['dense'] (a list)", "'dense'"],
    "negative": ["seed is -1", "from 0 to 2^64 - 1"],
    "half a seed": ["seed is 0.5", "whole number"],
    "extra": ["extra is 5", "list", "write extra=[...]"],
    "one extra": ["extra is Linear(", "list", "write extra=[...]"],
    "extra text": ["extra is 'ema'", "list", "write extra=[...]"],
    "group": ["group is 'x'", "process_group=", "leave it out"],
    "ranks": ["group has the ranks [0, 2]", "[0, 1, 2, 3]", "process_group="],
    "long": ["socket is '/tmp/xxx", "109 bytes", "at most 107", "symbolic link"],
    "socket": ["socket is 5", "path"],
    "job": ["job is 5", "text"],
    "selection": ["selection is 5", "decision, star, var, auto"],
    "nonfinite": ["on_nonfinite is []", "raise, propagate, auto"],
    "share": ["shadow_share is 'half'", "above 0, at most 1"],
    "generators": ["generators is 5", "torch.Generator"],
    "typing error": ["'topkk@0.01/allgather'", "did you mean topk?"],
    "another": ["'powersdg(rank=2)'", "did you mean powersgd?"],
    "None": ["initial is 'None@0.1/allgather'", "did you mean none?"],
    "form": ["'qsgd@0.1/allgather'", "build qsgd without s", "from 1 to 127"],
    "capitals": ["'FP16'", "did you mean fp16?"],
    "class": ["optimizer is the class SGD", "optimizer=SGD(model.parameters(), ...)"],
    "scheduler": ["scheduler is <object", "state_dict and load_state_dict", "leave it out"],
    "scaler": ["scaler is 2.0", "state_dict and load_state_dict"],
    "scheduler class": ["scheduler is <class 'torch.optim.lr_scheduler.StepLR'>", "an object with state_dict"],
    "extra class": ["extra is <class", "an object with state_dict"],
    "generator class": ["one of generators is <class", "a torch.Generator"],
    "register": ["register is 'no'", "True", "False", "session.hook"],
    "beside": ["initial is 'garbage'", "flexcomm.torch.compressors()"],
    "empty": ["strategy is ''", "leave the argument out", "'dense'"],
    "all": ["'topk@1/allgather'", "k of topk", "below 1"],
    "folder": ["socket is '/tmp', a folder", "agent.sock in its run_dir"],
    "file": ["bad.py', a file that is no socket", "agent.sock in its run_dir"],
    "no candidates": ["candidates is []", "1 to 16 compressors as texts", "None: the default ones"],
    "number of candidates": ["candidates is 5", "1 to 16 compressors as texts"],
    "one candidate": ["candidates is 'topk(k=*)+ef(vanilla)'", "1 to 16 compressors as texts"],
    "candidate number": ["candidates is ['fp16', 5]", "1 to 16 compressors as texts"],
    "candidate typing error": ["candidates is ['fp16', 'topkk']", "topkk", "did you mean topk?"],
    "dense candidate": ["candidates is ['fp16', 'dense']", "dense is always a candidate", "leave it out"],
    "many candidates": ["candidates is [", "1 to 16 compressors as texts"],
    "policy": ["policy is 'observe'", "a dict with any of the keys of a job's policy"],
    "policy key": ["policy is {'kind': ['topk']}", 'unknown key "kind", did you mean kinds?'],
    "policy kinds": ["policy is {'kinds': {'topk'}}", "set is not JSON serializable"],
    "policy value": ["least_gain is 2, allowed is 0 to 1"],
    "policy pin": ["pin.strategy: ", "did you mean topk?"],
    "policy time": ["pin.until: ", "expected a time with its zone, from 1970 to 9999-12-30, as in RFC 3339"],
    "policy pair": ["observe and pin do not go together"],
    "strange": ["SGD of 6 parameters", "model.parameters()", "leave it out"],
}

def _told(kind, text, words):
    deep = ("has no attribute", "not iterable", "convert", "unhashable", "argument '")
    return kind == "ValueError" and all(w in text for w in words) and not any(d in text for d in deep)


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_arguments_of_a_wrong_kind_are_refused_by_name_on_all_ranks(seen, name):
    for rank in seen:
        for which, of in (("everywhere", "rank 0"), ("alone", "rank 2")):
            kind, text, _ = rank["wrong kinds"][which][name]
            assert _told(kind, text, [of, *WRONG_KINDS[name]]), (which, kind, text)


def test_the_agent_is_offered_the_compressors_that_the_script_names(seen):
    for rank in seen:
        candidates, on_request = rank["offered"]["default"]
        assert candidates[0] == "none" and "topk(k=*)+ef(vanilla)" in candidates and "qsgd(s=16)" not in candidates
        named, others = rank["offered"]["named"]
        # Once each, the same on every rank, and dense, which is always a candidate.
        assert named[0] == "none" and sorted(named[1:]) == ["fp16", "qsgd(s=16)", "topk(k=*)+ef(vanilla)"]
        # The default ones that it leaves out a job's policy may still ask for.
        assert set(others) == {*candidates, *on_request} - set(named)


def test_what_the_script_sets_for_the_job_is_in_the_hello(seen):
    for number, rank in enumerate(seen):
        given, absent = rank["offered"]["policies"]
        assert given == {"kinds": ["eightbit", "fp16"], **({} if number == 2 else {"observe": True})} and absent is None


def test_ranks_that_name_different_candidates_are_refused(seen):
    for rank in seen:
        kind, text, _ = rank["offered"]["differ"]
        assert kind == "FlexcommError" and "the candidates" in text and "rank 2" in text, text


def test_an_optimizer_of_a_part_of_the_model_is_taken(seen):
    assert all(rank["wrong kinds"]["part"] == [None, "", 0] for rank in seen)


def test_a_failed_attach_leaves_nothing_behind_on_any_rank(seen):
    for rank in seen:
        for found in rank["after a failure"]:
            kind, text, _ = found["failed"]
            assert kind == "ValueError" and "rank 1: no thread can be started" in text, text
            assert found["clean"] == [0, 0, 0]
            assert found["again"] == [[None, "", 0], [5, True]]


def test_a_hook_of_torchs_own_is_seen(seen):
    for rank in seen:
        (kind, text, _), hooks = rank["torch's own hook"]
        assert kind == "FlexcommError" and "has one already" in text and "FP16_COMPRESS" in text and hooks == 0, text


def test_models_at_one_agent_need_jobs_of_their_own(seen):
    for rank in seen:
        rank = rank["models of one job"]
        kind, text, _ = rank["refused"]
        assert kind == "FlexcommError" and "rank 1" in text and "attach(job=...)" in text and "close()" in text, text
        assert rank["versions"] == [1, 0]
        assert rank["again"] == rank["after"] == [None, "", 0]


def test_fsdp_is_a_clear_error(seen):
    assert all(rank["fsdp"][0] == "FlexcommError" and "FSDP" in rank["fsdp"][1] for rank in seen)


def test_the_core_never_crashes(seen):
    assert all(kind in ("FlexcommError", "ValueError") for rank in seen for kind, _, _ in rank["broken"])


def test_a_bucket_without_the_hook_is_an_error_where_others_compress(seen):
    for rank in seen:
        kind, text, answered = rank["passed by"]
        assert kind == "FlexcommError" and "topk(k=0.1)+ef(vanilla)/allgather" in text and answered == 3


def test_a_residual_that_has_overflowed_is_told_from_a_gradient():
    residual, gradient = (int(Status.Overflowed), 1), (int(Status.NotFinite), 1)
    assert _whose([(0, 0), residual, gradient, gradient]) == "the gradient of rank 2, 3 and the residual of rank 1"
    assert _whose([(0, 0)]) == "the sum of the ranks' gradients"
