"""Okabe and Ito's palette, told apart by colour-blind readers."""

from __future__ import annotations

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9",
)  # fmt: skip

# For settings that have an order, such as K: apart in black and white too.
BLUES = ("#5DA5D1", "#3A8AC2", "#1C6CB1", "#0B4A8F", "#082B5C")
REDS = ("#EE8434", "#C24E0A", "#7A2E00")
GREY = "0.45"
