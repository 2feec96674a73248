"""Okabe and Ito's palette, which colour-blind readers can distinguish."""

from __future__ import annotations

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9",
)  # fmt: skip
