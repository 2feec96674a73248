"""One set of defaults for the API, `diagnose` and both commands, with the evidence beside each."""

from __future__ import annotations

LOSSES = 35
"""Losses per window of the loop that `diagnose` asks about: the usual length in word models."""

UPDATE_LOSSES = 20
"""Losses per window of the recommended loop, at least. Windows of about 20 are good where no long
memory is needed (`benchmarks/arena`)."""

UPDATE_LOSSES_PER_K = 2.0
"""Losses per window of the recommended loop, relative to K: on average a loss then sees K lags."""

GUESS_DELTA = 0.2
"""Bias that the recommended loop aims at. Arbitrary: 0.3 came out alike in pilots."""

GUESS_K_MAX = 80
"""Largest K of the recommended loop, whose windows are then as long as the long windows."""

LONG_WINDOWS = 160
"""Losses of the long windows of the recommended loop. Arbitrary: eight times a usual window."""

DELTA = 0.1
"""Tolerated bias that `diagnose` recommends for; the paper's most careful setting."""

LAGS = 256
"""How far back `diagnose` looks (R); less where the data are shorter."""

BURN_IN = 20
"""Steps that warm the state up before a measurement; as in the authors' release."""

K_MIN, K_MAX, PROBE_LAGS = 1, 100, 100
"""Limits of K and lags of an estimate while training; the paper's for the copy task."""

ESTIMATE_SHARE = 0.05
"""Steps that estimates of K read, relative to those of training, at most. An estimate for 35 losses
and 100 lags reads 8 windows, 1,240 steps: as much as a short epoch."""

LEVEL = 0.9
"""Coverage of intervals."""

SAMPLES = 64
"""Losses that a diagnosis of the decay probes, at least: one batch of the paper's copy task."""

CHECK_SEGMENTS = 64
"""Windows of every row that `check_bias` backpropagates."""

SECONDS = 30.0
"""What `diagnose` may take, unless told otherwise."""

TOLERANCE = 0.01
"""Change of the predictions that `lookback` tolerates, as a share of their variance."""

HISTORY = 1024
"""Longest history that `lookback` tries; half of a shorter stream. Arbitrary: nearly three years of
days."""
