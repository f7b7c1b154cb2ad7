"""A stand-in for TransformerEngine 2.20.2 where there is no GPU: `PYTHONPATH=tests/stand_ins` makes it importable.

Its modules have the constructors, parameters, dtypes, checks and state keys of the real ones, as far as Megatron-Core
0.16.1 and this project use them. Parameters are made on "cuda", which `parallel/cpu_platform.py` turns into the CPU.
Kernels raise, as the real ones do with tensors on a CPU, until `pytorch.kernels.compute()` is called: then they compute
in plain torch what the real ones are documented and tested to compute. What a kernel lacks is missing here too.
"""

from transformer_engine import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
