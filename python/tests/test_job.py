"""The name that a job has when its script gives none."""

import pytest

from flexcomm.torch import _arguments

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, "default"),
        ({"TORCHELASTIC_RUN_ID": "7f3a", "SLURM_JOB_ID": "12"}, "7f3a"),
        ({"TORCHELASTIC_RUN_ID": "resnet/1 b"}, "resnet-1-b"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "default"),
        ({"TORCHELASTIC_RUN_ID": "None", "SLURM_JOB_ID": "4711"}, "slurm-4711"),
        ({"TORCHELASTIC_RUN_ID": "//", "SLURM_JOB_ID": "4711"}, "slurm-4711"),
        ({"TORCHELASTIC_RUN_ID": "r" * 90}, "r" * 63),
        ({"HOSTNAME": "bert-worker-3"}, "default"),
        ({**POD, "HOSTNAME": "bert-worker-3"}, "bert"),
        ({**POD, "HOSTNAME": "bert-master-0", "JOB_COMPLETION_INDEX": "0"}, "bert"),
        ({**POD, "HOSTNAME": "sweep-12", "JOB_COMPLETION_INDEX": "12"}, "sweep"),
        ({**POD, "HOSTNAME": "sweep-12"}, "default"),
        ({**POD, "HOSTNAME": "sweep-7d9f8", "JOB_NAME": "nightly"}, "nightly"),
    ],
)
def test_the_launchers_own_id_is_the_default_name(env: dict[str, str], name: str) -> None:
    assert _arguments.default_job(env) == name
