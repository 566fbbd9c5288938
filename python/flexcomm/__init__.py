"""flexcomm keeps data-parallel training at the best compressor, ratio and collective while the network changes.

``flexcomm.torch.attach(ddp_model, optimizer)`` is the one line in a training script;
``flexcomm.compress(tensor, "topk(0.01)")`` compresses one tensor by itself.
"""

from flexcomm._core import VERSION as __version__
from flexcomm._compress import Compressor, Message, compress, decompress
from flexcomm._core import FlexcommError

__all__ = ["Compressor", "FlexcommError", "Message", "__version__", "compress", "decompress"]
