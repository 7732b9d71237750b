"""Error diffusion against loops over pixels, scipy's correlation, and least squares written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import signal
from torch import Tensor

from ptq.formats import affine
from ptq.formats.diffusion import REACH, correlation_of, diffused, spread_of

SIZE = 2 * REACH + 1


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def averaging(side: int = 6, channels: int = 1) -> Tensor:
    """The gradient of an average over a window."""
    return torch.ones(1, channels, side, side, dtype=torch.float64) / side**2


def pixel_by_pixel(image: Tensor, scale: float, zero: float, first: int, last: int, spread: Tensor) -> np.ndarray:
    """In the order of 2y + x: add what was spread to a value, round it, keep what is left."""
    channels, height, width = image.shape
    x, shares = image.double().numpy() / scale, spread.double().numpy()
    errors, found = np.zeros_like(x), np.zeros_like(x)
    for y, across in sorted(np.ndindex(height, width), key=lambda place: 2 * place[0] + place[1]):
        for channel in range(channels):
            value = x[channel, y, across]
            for down, right in np.ndindex(SIZE, SIZE):
                row, column = y - (down - REACH), across - (right - REACH)
                if 0 <= row < height and 0 <= column < width:
                    value += shares[channel, :, down, right] @ errors[:, row, column]
            code = np.clip(np.rint(value), first - zero, last - zero)
            errors[channel, y, across] = np.clip(code - value, -1, 1)
            found[channel, y, across] = code * scale
    return found


@pytest.mark.parametrize("shape", [(3, 9, 7), (1, 5, 12), (2, 1, 8), (4, 8, 1), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("zero", [0.0, -3.0])
def test_waves_equal_a_loop_over_pixels(shape: tuple[int, ...], zero: float) -> None:
    images = random(5, *shape).float() * 2
    spread = spread_of(correlation_of(random(20, shape[0], 10, 10, seed=1)))
    found = diffused(images, 0.4, zero, -8, 7, spread)
    assert found.dtype == torch.float32 and found.is_contiguous()
    for image, expected in zip(found, images, strict=True):
        torch.testing.assert_close(
            image.double(), torch.tensor(pixel_by_pixel(expected, 0.4, zero, -8, 7, spread)), atol=1e-5, rtol=0
        )


def test_nothing_spread_is_rounding_to_nearest() -> None:
    x, nothing = random(4, 3, 6, 6).float(), torch.zeros(3, 3, SIZE, SIZE)
    expected = affine.fake(x, torch.tensor(0.25), torch.tensor(-2.0), -8, 7)
    torch.testing.assert_close(diffused(x, 0.25, -2.0, -8, 7, nothing), expected, atol=1e-6, rtol=0)


def test_an_image_alone_and_in_a_batch_are_the_same() -> None:
    x, spread = random(32, 3, 16, 16).float(), spread_of(correlation_of(random(8, 3, 16, 16, seed=1)))
    together = diffused(x, 0.3, 0.0, -8, 7, spread)
    assert torch.equal(together, torch.cat([diffused(image[None], 0.3, 0.0, -8, 7, spread) for image in x]))


@pytest.mark.parametrize("size", [(8, 8), (3, 11), (1, 1)], ids=str)
def test_the_correlation_is_that_of_scipy(size: tuple[int, int]) -> None:
    gradients = random(4, 2, *size)
    found = correlation_of(gradients)
    for a, b in np.ndindex(2, 2):
        wide = sum(signal.correlate2d(g[b].numpy(), g[a].numpy(), mode="full") for g in gradients)
        expected = np.zeros((4 * REACH + 1, 4 * REACH + 1))
        for down, right in np.ndindex(*expected.shape):  # the middle is no shift
            row, column = down - 2 * REACH + size[0] - 1, right - 2 * REACH + size[1] - 1
            if 0 <= row < wide.shape[0] and 0 <= column < wide.shape[1]:
                expected[down, right] = wide[row, column]
        np.testing.assert_allclose(found[a, b].numpy(), expected, atol=1e-9)


def test_the_spread_is_the_least_squares_solution() -> None:
    """What an error changes, for each place where the gradients may lie: a matrix, solved by numpy."""
    gradients, channels = random(2, 2, 5, 5), 2
    spread = spread_of(correlation_of(gradients), damping=0.0)
    places = [
        (down, right, channel)
        for down in range(-REACH, REACH + 1)
        for right in range(-REACH, REACH + 1)
        if 2 * down + right > 0 or (down, right) == (0, 0)
        for channel in range(channels)
    ]

    def changed_by(place: tuple[int, int, int]) -> np.ndarray:
        down, right, channel = place
        impulse = np.zeros((SIZE, SIZE))
        impulse[REACH + down, REACH + right] = 1
        return np.concatenate([signal.correlate2d(impulse, g[channel].numpy(), mode="full").ravel() for g in gradients])

    for source in range(channels):
        own = (0, 0, source)
        later = [place for place in places if place[:2] != (0, 0) or place[2] > source]
        columns = np.stack([changed_by(place) for place in later], 1)
        expected = np.linalg.lstsq(columns, -changed_by(own), rcond=None)[0]
        found = np.array([float(spread[c, source, REACH + down, REACH + right]) for down, right, c in later])
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert np.count_nonzero(spread[:, source]) == len(later)  # and nothing goes anywhere else


def test_where_every_value_counts_by_itself_nothing_is_spread() -> None:
    correlation = torch.zeros(3, 3, 4 * REACH + 1, 4 * REACH + 1, dtype=torch.float64)
    correlation[range(3), range(3), 2 * REACH, 2 * REACH] = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert not spread_of(correlation).any()


def test_averages_stay_where_single_pixels_do_not() -> None:
    """Nearly all of an error is passed on; averages over windows are several times closer, pixels further off."""
    spread = spread_of(correlation_of(averaging()))
    assert float(spread.sum()) == pytest.approx(-1, abs=0.1)
    x = torch.rand(16, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.avg_pool2d(x, 3, stride=1)
    rounded, spread_out = (diffused(x, 0.2, 0.0, -8, 7, how) for how in (torch.zeros_like(spread), spread))

    def off(found: Tensor) -> float:
        return float(torch.nn.functional.avg_pool2d(found - x, 6, stride=1).square().mean())

    assert off(spread_out) < off(rounded) / 10
    assert float((spread_out - x).square().mean()) > float((rounded - x).square().mean())


def test_what_is_outside_the_range_does_not_pile_up() -> None:
    """A bright region, clipped, darkens nothing but its edge."""
    spread = spread_of(correlation_of(averaging()))
    x = torch.full((1, 1, 24, 24), 0.33)
    x[..., :12] = 50.0
    found = diffused(x, 0.2, 0.0, -8, 7, spread)
    assert bool((found[..., :12] == 1.4).all())
    assert float(found[..., 16:].mean()) == pytest.approx(0.33, abs=0.02)
