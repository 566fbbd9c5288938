"""flexcomm keeps data-parallel training at the best compression ratio and collective while the network changes.

``flexcomm.torch.attach(ddp_model, optimizer)`` is the one line in a training script.
"""

from flexcomm._core import VERSION as __version__
from flexcomm._core import FlexcommError

__all__ = ["FlexcommError", "__version__"]
