"""Units, and the only place where numbers become text.

Bytes are `int` everywhere and become text here alone. Memory on a device is shown in GiB (2**30
bytes), because CUDA and PyTorch report it so; file sizes and rates are shown in GB (10**9 bytes),
because data sheets do. Llama-3.1-8B in bf16 is 16.06 GB and 14.96 GiB.
"""

from __future__ import annotations

MIB = 2**20
GIB = 2**30
GB = 10**9
TERA = 10**12  # FLOP/s are decimal, like bandwidth


def mib(n_bytes: int, digits: int = 1) -> str:
    """Bytes as MiB.

    >>> mib(1_572_864)
    '1.5 MiB'
    """
    return f"{n_bytes / MIB:.{digits}f} MiB"


def gib(n_bytes: int, digits: int = 2) -> str:
    """Bytes as GiB: for memory on a device.

    >>> gib(16_060_522_496)
    '14.96 GiB'
    >>> gib(80 * GIB, digits=0)
    '80 GiB'
    """
    return f"{n_bytes / GIB:.{digits}f} GiB"


def gb(n_bytes: int, digits: int = 2) -> str:
    """Bytes as GB: for sizes of files and of what travels on a wire.

    >>> gb(16_060_522_496)
    '16.06 GB'
    """
    return f"{n_bytes / GB:.{digits}f} GB"


def gb_per_s(bytes_per_s: float, digits: int = 0) -> str:
    """Bytes per second as GB/s: for bandwidth.

    >>> gb_per_s(4800 * GB)
    '4800 GB/s'
    """
    return f"{bytes_per_s / GB:.{digits}f} GB/s"


def tflops(flop_per_s: float, digits: int = 0) -> str:
    """Floating-point operations per second as TFLOP/s.

    >>> tflops(989.4e12, digits=1)
    '989.4 TFLOP/s'
    """
    return f"{flop_per_s / TERA:.{digits}f} TFLOP/s"


def signed_percent(fraction: float, digits: int = 1) -> str:
    """A fraction as a signed percentage: for the error of a forecast, `forecast / measured - 1`.

    >>> signed_percent(0.0131), signed_percent(-0.25), signed_percent(-0.0001)
    ('+1.3 %', '-25.0 %', '+0.0 %')
    """
    # Adding 0.0 turns a rounded -0.0 into 0.0, so that "no difference" has one spelling.
    return f"{round(100 * fraction, digits) + 0.0:+.{digits}f} %"
