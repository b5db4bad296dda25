"""RMSNorm and add+RMSNorm as fused Triton kernels, with their definition and their peers.

Nothing here imports from the rest of the project. Without a GPU the Triton kernels run through
Triton's interpreter: the same code, the same results, no speed.
"""

from kernels.functional import add_rms_norm, rms_norm
from kernels.module import RMSNorm
from kernels.registry import NORMS, Norm, load_norm

__all__ = ["NORMS", "Norm", "RMSNorm", "add_rms_norm", "load_norm", "rms_norm"]
