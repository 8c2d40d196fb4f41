"""Rotations are read off the map they apply, whatever they are called and however spelled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxport.idioms.rotary import Rotation, identify, rotate

POSITIONS = np.concatenate([np.arange(13), np.arange(13) * 5 + 3])


def maps(rotation: Rotation, width: int) -> np.ndarray:
    eye = np.eye(width)[None, None].repeat(len(POSITIONS), axis=1)
    turned = rotate(eye, POSITIONS[None], rotation)
    return np.swapaxes(turned[0], 1, 2)


@given(
    pairs=st.integers(1, 8),
    before=st.integers(0, 5),
    after=st.integers(0, 5),
    interleaved=st.booleans(),
    sign=st.sampled_from([1, -1]),
    factor=st.floats(0.5, 2.0),
    theta=st.floats(50.0, 1e6),
)
@settings(max_examples=60, deadline=None)
def test_any_rotation_is_identified(
    pairs: int, before: int, after: int, interleaved: bool, sign: int, factor: float, theta: float
) -> None:
    freqs = tuple(float(f) for f in theta ** (-np.arange(pairs) / pairs))
    wanted = Rotation(interleaved, 2 * pairs, before, sign, factor, freqs)
    width = before + 2 * pairs + after
    found = identify(POSITIONS, maps(wanted, width))
    assert found is not None
    assert (found.width, found.offset, found.sign) == (wanted.width, wanted.offset, wanted.sign)
    assert found.interleaved == interleaved or pairs == 1
    assert np.allclose(found.freqs, freqs, rtol=1e-6)
    assert abs(found.factor - factor) < 1e-9


def test_a_map_that_is_no_rotation_is_refused() -> None:
    rotation = Rotation(False, 8, 0, 1, 1.0, (1.0, 0.3, 0.1, 0.03))
    broken = maps(rotation, 8)
    broken[:, 0, 0] *= 1.01
    assert identify(POSITIONS, broken) is None


def test_no_rotation_at_all_is_not_a_rotation() -> None:
    assert identify(POSITIONS, np.eye(6)[None].repeat(len(POSITIONS), axis=0)) is None


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_an_angle_that_is_not_linear_in_the_position_is_refused(power: float) -> None:
    angle = POSITIONS.astype(float) ** power
    cos, sin = np.cos(angle), np.sin(angle)
    bent = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], -2)
    assert identify(POSITIONS, bent) is None
