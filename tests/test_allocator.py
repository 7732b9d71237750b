"""glibc's allocator, tuned, in a process of its own."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

BYTES = 100 * 2**20
PAGE_FAULTS = f"""
import ctypes, resource, threading
import ptq

assert ptq.tune_allocator()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def fill(times):
    for _ in range(times):
        block = libc.malloc({BYTES})
        libc.memset(block, 1, {BYTES})
        libc.free(block)

def fill_in_a_thread(times):
    thread = threading.Thread(target=fill, args=(times,))
    thread.start()
    thread.join()

for run in (fill, fill_in_a_thread):
    run(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run(10)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_large_blocks_are_kept_in_threads_too() -> None:
    """Walking through networks in threads paid page faults for every map: threads have heaps of 64 MB of their own."""
    script = [sys.executable, "-c", PAGE_FAULTS]
    found = subprocess.run(script, capture_output=True, text=True, check=True).stdout.split()
    assert all(int(faults) * resource.getpagesize() < BYTES for faults in found), found  # ten blocks paid at most once
