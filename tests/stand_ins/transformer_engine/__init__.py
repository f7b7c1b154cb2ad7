"""A stand-in for TransformerEngine 2.20.2 where there is no GPU: `PYTHONPATH=tests/stand_ins` makes it importable.

Its modules have the constructors, parameters, dtypes and state keys of the real ones, as far as Megatron-Core 0.16.1
and this project use them. Whatever would run a kernel raises, as the real one does with tensors on a CPU. Parameters
are made on "cuda", which `parallel/cpu_platform.py` turns into the CPU.
"""

from transformer_engine import common, pytorch

__version__ = "2.20.2"
__all__ = ["common", "pytorch"]
