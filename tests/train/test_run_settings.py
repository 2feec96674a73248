"""Settings: a run with others is not resumed, and checkpoints from before still can be."""

import pytest

import adaptive_tbptt as at
from adaptive_tbptt.train.training_state import require_same_settings

from ..small_run import build, streams

ALL = {"losses": 5}, {"losses": 6}, {"losses_per_k": 0.5}, {"losses_per_k": 5.0}, {}


def test_losses_and_losses_per_k_are_told_apart():
    found = [build(windows=windows).settings["losses"] for windows in ALL]
    assert found == ["5", "6", "0.5", "5.0", "1.0"]
    # K losses per window is the default, however it is said.
    assert build(windows={"losses_per_k": 1}).settings == build().settings


@pytest.mark.parametrize(
    "other",
    [{"losses": 6}, {"losses_per_k": 5.0}, {}, {"losses": 5, "overlap": False},
     {"losses": 5, "burn_in": 4}, {"losses": 5, "estimates_per_epoch": 2},
     {"losses": 5, "estimate_every": 30}],
)  # fmt: skip
def test_other_windows_are_not_resumed(tmp_path, other):
    build(tmp_path, windows={"losses": 5}).fit(*streams(), epochs=1)
    with pytest.raises(at.train.TrainingError, match=r"written with other settings: .* was .*, is"):
        build(tmp_path, windows=other).fit(*streams(), epochs=2, resume=True)


def test_every_setting_that_differs_is_named():
    saved = {**build().settings, "clip": "None", "overlap": "False"}
    with pytest.raises(at.train.TrainingError, match=r"clip was None, is Clip.*overlap was False"):
        require_same_settings(saved, build().settings, "last.safetensors")


def test_a_checkpoint_from_before_lags_had_their_name_can_be_resumed():
    present = build().settings
    saved = {**present, "controller": present["controller"].replace("lags=", "window=")}
    assert saved != present
    require_same_settings(saved, present, "last.safetensors")
