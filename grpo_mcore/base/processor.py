"""Which instructions the processor of this machine has."""

from pathlib import Path


def lacks_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this processor is known to have no instructions for products of bfloat16. Unknown: False."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return bool(flags) and not {"avx512_bf16", "amx_bf16"} & set(flags.split())


SLOW_BFLOAT16 = (
    "this processor has no bfloat16 instructions (avx512_bf16, amx_bf16): products take about 4 times as long as in "
    "float32, and without AVX-512 a hundred times"
)
"""The warning about bfloat16 on such a processor; benchmarks/bfloat16_cpu.py measures it."""
