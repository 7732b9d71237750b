"""Keep glibc from giving every large activation back to the system and paying page faults for it again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_LARGEST = 2**31 - 1


def tune_allocator() -> bool:
    """Serve large blocks from the heap and keep the heap; returns whether the C library took it.

    Eager networks on a CPU allocate and free tens of megabytes per layer. By default glibc maps and unmaps each of
    them, and the kernel zeroes every page anew: on MobileNetV2 more than half of the time. A no-op on systems
    without glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))
