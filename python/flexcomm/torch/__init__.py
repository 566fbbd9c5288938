"""flexcomm for PyTorch's DistributedDataParallel.

    session = flexcomm.torch.attach(ddp_model, optimizer)

registers a communication hook, connects to the node's agent and follows its decisions; ``torchrun`` as before.
"""

from flexcomm._core import FlexcommError
from flexcomm.torch._alone import CommHook
from flexcomm.torch._attach import attach, compressors
from flexcomm.torch._failures import NotFiniteError
from flexcomm.torch._session import Costs, Session
from flexcomm.torch._snapshot import Snapshot

__all__ = ["CommHook", "Costs", "FlexcommError", "NotFiniteError", "Session", "Snapshot", "attach", "compressors"]
