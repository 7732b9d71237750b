"""What refinement is made of: one word for a usual amount of work, or its steps by name.

The first of them, ``alpha``, is smoothing: whoever quantizes takes it before the network is rounded.
"""

from __future__ import annotations

from ptq.errors import InputError

STEPS = {
    "alpha": "and clipped ranges by layer, of a network that isn't smoothed yet, folded only",
    "image": "an image in few bits has its rounding errors spread",
    "ranges": "of inputs, and of weights by channel, by the error of the layer's output",
    "weights": "moved by ridge least squares towards the float output",
    "rounding": "that makes up for its own errors",
    "bias": "such that the mean residual is zero",
    "blocks": "learned, the layers of each together",
    "network": "learned as a whole",
}
LAYER_STEPS = frozenset(("ranges", "weights", "rounding", "bias"))
EFFORTS = {"fast": frozenset(STEPS) - {"blocks"}, "best": frozenset(STEPS)}


def steps_of(refine: str) -> frozenset[str]:
    """The steps of ``fast``, ``best``, ``none``, or of a text that names them.

    >>> sorted(steps_of("ranges,bias"))
    ['bias', 'ranges']
    """
    if refine == "none":
        return frozenset()
    if refine in EFFORTS:
        return EFFORTS[refine]
    named = [step.strip() for step in refine.split(",")]
    if not set(named) <= set(STEPS):
        raise InputError(f"--refine {refine!r}: choose none, fast or best, or steps: {','.join(STEPS)}")
    return frozenset(named)
