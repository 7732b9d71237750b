"""How much memory the process has taken."""

from __future__ import annotations

import sys


def peak_memory() -> int | None:
    """Bytes that were resident at most since the process began; None where the system doesn't say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
