"""Keep glibc from giving every large activation back to the system and paying page faults for it again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from malloc.h
_LARGEST = 2**31 - 1


def tune_allocator() -> bool:
    """Serve large blocks from one heap and keep it; returns whether the C library took it.

    Eager networks on a CPU allocate and free tens of megabytes per layer. By default glibc maps and unmaps each of
    them, and the kernel zeroes every page anew: on MobileNetV2 more than half of the time. Threads have heaps of their
    own, too small for such blocks, so all of them share the main one: refinement walks through networks in threads. A
    no-op on systems without glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    wanted = {_M_MMAP_THRESHOLD: _LARGEST, _M_TRIM_THRESHOLD: _LARGEST, _M_ARENA_MAX: 1}
    return all(bool(mallopt(option, value)) for option, value in wanted.items())
