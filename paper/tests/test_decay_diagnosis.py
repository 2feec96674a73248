import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests._torch.test_compile import Graphs, Parts
from tests.elsewhere import other_device
from tests.model import test_complex_state as complex_state
from tests.oracle import LinearRNN, along
from torch import nn
from torch.nn import functional as F

import adaptive_tbptt as at
from atbptt_paper import decay


def diagnose_decay(*arguments, lags, gauge=None, **sampling):
    how = at.diagnosis.Sampling(**{"level": 0.95, **sampling})
    return decay.diagnose_decay(*arguments, lags=lags, gauge=gauge, sampling=how)


def report(deltas=(0.9, 0.5, 0.1), **options):
    data = torch.randn(300, 8, 3), torch.randn(300, 8, 6)
    model = nn.LSTM(3, 6, 2)
    return diagnose_decay(model, F.mse_loss, data, deltas, lags=80, samples=32, **options)


def test_the_report_is_its_stages_put_together():
    found = report(gauge=at.truncate.ReleaseGauge(tau=0.5))
    assert found.profile.state_norms.shape == (81, 32)
    fit = at.fit_decay(found.profile.mean, 0.5)
    assert found.fit == fit
    bias = at.bias_bound(found.profile.mean, fit, found.profile.cumulative_norms)
    for decision in found.decisions:
        assert decision == at.choose_truncation(bias, delta=decision.delta, k_max=80)
    spread = decay.bootstrap(
        found.profile.state_norms,
        fit,
        deltas=(0.9, 0.5, 0.1),
        k_max=80,
        gradient_norms=found.profile.cumulative_norms,
    )
    assert (found.uncertainty.beta, found.uncertainty.k) == (spread.beta, spread.k)
    np.testing.assert_array_equal(found.uncertainty.relative, spread.relative)


def test_every_part_of_the_state_has_a_rate_by_the_gauges_method():
    found = report(gauge=at.truncate.PaperGauge(tau=0.5, method="max"))
    assert found.component_beta == {
        name: at.fit_decay(norms.mean(axis=1), 0.5, "max").beta
        for name, norms in found.profile.component_norms.items()
    }
    assert list(found.component_beta) == ["h[0]", "h[1]", "c[0]", "c[1]"]
    slowest = max(found.component_beta.items(), key=lambda item: item[1])
    assert f"slowest part of the state: {slowest[0]}, beta={slowest[1]:.4g}" in found.notes


def test_the_mode_is_the_models_own_unless_asked():
    assert report().profile.train
    assert not report(train=False).profile.train


def test_whole_batches_are_sampled_until_there_are_enough():
    data = torch.randn(100, 8, 3), torch.randn(100, 8, 6)
    found = diagnose_decay(nn.RNN(3, 6), F.mse_loss, data, lags=20, samples=20)
    assert found.profile.samples == 24


def test_every_batch_has_a_dropout_of_its_own_that_the_seed_fixes():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.drop = nn.RNN(3, 6), nn.Dropout(0.5)

        def forward(self, x, state):
            return self.rnn(self.drop(x), state)

    model, data = Dropped(), (torch.ones(100, 2, 3), torch.ones(100, 2, 6))

    def norms(seed):
        torch.rand(1)  # where the caller's random state is does not matter
        found = diagnose_decay(model, F.mse_loss, data, lags=20, samples=6, seed=seed)
        return found.profile.state_norms

    one = norms(3)
    # The data are constant: only the masks tell the batches apart.
    assert len({column.tobytes() for column in one.T}) == 6
    np.testing.assert_array_equal(norms(3), one)
    assert (norms(4) != one)[1:].all()


def test_one_row_whose_targets_are_half_ignored():
    class Flat(nn.CrossEntropyLoss):
        def forward(self, outputs, targets):
            return super().forward(outputs.flatten(0, 1), targets.flatten())

    targets = torch.randint(6, (300, 1))
    targets[torch.rand(300, 1) < 0.5] = -100
    data = torch.randn(300, 1, 3), targets
    found = diagnose_decay(nn.RNN(3, 6), Flat(), data, lags=20, samples=32)
    assert found.profile.samples == 32
    assert (found.profile.state_norms[1] > 0).all()


def test_it_prints_a_table_with_every_delta_and_a_verdict():
    found = report(deltas=(0.7, 0.2))
    text = str(found)
    lines = text.splitlines()
    assert lines[1].split() == ["delta", "K", "95%", "bound", "outcome"]
    assert lines[2].split()[:2] == ["0.7", str(found.decisions[0].k)]
    assert found.stability.verdict in text
    assert "slowest part of the state" in text


def test_the_dict_is_json():
    made = report()
    found = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert found["mean"] == made.profile.mean.tolist()
    assert [choice["delta"] for choice in found["choices"]] == [0.9, 0.5, 0.1]
    assert len(found["mean"]) == 81
    assert found["choices"][0]["k_interval"][0] <= found["choices"][0]["k"]


def test_same_seed_same_report():
    torch.manual_seed(1)
    one = report(seed=5).to_dict()
    torch.manual_seed(1)
    assert report(seed=5).to_dict() == one


def test_a_model_that_does_not_decay_is_told_so():
    stream = at.SequenceStream(torch.zeros(100, 4, 3), torch.zeros(100, 4))
    found = diagnose_decay(LinearRNN(1.02 * torch.eye(2)), along(torch.ones(2)), stream, lags=50)
    assert all(d.k == 50 and not d.outcome.met for d in found.decisions)
    assert found.to_dict()["choices"][0]["relative_bias"] is None
    assert any("does not decay" in note for note in found.notes)


def test_batch_first_models_and_streams():
    model = nn.LSTM(3, 6, batch_first=True)
    data = torch.randn(8, 200, 3), torch.randn(8, 200, 6)
    given = diagnose_decay(model, F.mse_loss, data, lags=40)
    stream = at.SequenceStream(*data, batch_first=True)
    assert diagnose_decay(model, F.mse_loss, stream, lags=40).to_dict() == given.to_dict()


def test_resets_of_the_stream_reach_the_probe():
    resets = torch.zeros(300, 8, dtype=torch.bool)
    resets[::10] = True
    stream = at.SequenceStream(torch.randn(300, 8, 3), torch.randn(300, 8, 6), resets)
    found = diagnose_decay(nn.RNN(3, 6), F.mse_loss, stream, lags=40)
    # Sequences of ten steps: no gradient reaches back more than nine.
    assert (found.profile.mean[11:] == 0).all()
    assert found.profile.mean[9] > 0
    assert found.fit.beta == 0.0
    assert any("exactly zero" in note for note in found.notes)


class Detached(nn.Module):
    """Drops the gradient of the state it is handed, as some kernels do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 4)

    def forward(self, inputs, state=None):
        return self.layer(inputs, None if state is None else state.detach())


@pytest.mark.parametrize("resets", [False, True])
def test_a_kernel_that_drops_the_gradient_is_refused_with_resets_too(resets):
    x, y = torch.randn(200, 4, 3), torch.randn(200, 4, 4)
    starts = torch.zeros(200, 4, dtype=torch.bool)
    starts[::20] = resets
    with pytest.raises(ValueError, match="no gradient reaches the state"):
        diagnose_decay(Detached(), F.mse_loss, at.SequenceStream(x, y, starts), lags=30)


def test_one_row_and_few_samples():
    data = torch.randn(300, 1, 3), torch.randn(300, 1, 6)
    found = diagnose_decay(nn.RNN(3, 6), F.mse_loss, data, lags=40, samples=1)
    assert found.uncertainty is None
    assert any("only 1 losses" in note for note in found.notes)
    assert str(found)


def test_the_figure_shows_draws_mean_fit_and_every_k(tmp_path):
    found = report()
    figure = found.figure(tmp_path / "deep" / "decay.png")
    assert (tmp_path / "deep" / "decay.png").stat().st_size > 10_000
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    labels = [line.get_label() for line in axes.lines]
    assert "mean" in labels
    assert "single losses" in labels
    assert sum(label.startswith("delta = ") for label in labels) == 3
    mean = axes.lines[labels.index("mean")]
    np.testing.assert_allclose(mean.get_ydata(), found.profile.mean)
    fit = found.fit
    drawn = next(line for line in axes.lines if line.get_label().startswith("fit: "))
    lags = np.arange(fit.tau, fit.last + 1)
    np.testing.assert_array_equal(drawn.get_xdata(), lags)
    expected = found.profile.mean[fit.tau] * fit.beta ** (lags - fit.tau)
    np.testing.assert_allclose(drawn.get_ydata(), expected, rtol=1e-9)


def test_what_holds_for_every_delta_is_said_once():
    found = report()
    none = replace(
        found.decisions[0], outcome=at.estimate.Outcome.NO_BOUND, message="there is no bound"
    )
    assert replace(found, decisions=(none, none)).notes.count("there is no bound") == 1


def test_deltas_are_checked_before_anything_is_measured():
    def never(outputs, targets):
        raise AssertionError("the loss was evaluated")

    data = torch.zeros(50, 2, 3), torch.zeros(50, 2, 6)
    with pytest.raises(ValueError, match="delta must be in"):
        diagnose_decay(nn.RNN(3, 6), never, data, (1.5,), lags=20)


def test_a_window_longer_than_the_data():
    stream = at.SequenceStream(torch.randn(12, 3, 2), torch.randn(12, 3, 4))
    with pytest.raises(ValueError, match="120 steps does not fit into a stream of 12"):
        diagnose_decay(nn.LSTM(2, 4), F.mse_loss, stream, lags=100)


def test_stability_and_k_of_a_complex_state_are_those_of_pairs():
    x, y, _ = complex_state.data(400)
    ours, theirs = complex_state.both(
        lambda model: diagnose_decay(model, F.mse_loss, (x, y), lags=50, samples=12)
    )
    assert [d.k for d in ours.decisions] == [d.k for d in theirs.decisions]
    assert ours.stability.jacobian_norm == pytest.approx(theirs.stability.jacobian_norm, rel=1e-4)


def test_it_compiles_nothing():
    torch._dynamo.reset()
    graphs = Graphs()
    model = torch.compile(Parts(), backend=graphs)
    data = torch.randn(61, 2, 3), torch.randn(61, 2, 4)
    diagnose_decay(model, F.mse_loss, data, lags=20, samples=8)
    assert graphs.count == 0


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of torch's mkldnn flags
@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM])
def test_another_device_gives_the_same(make, monkeypatch):
    monkeypatch.setattr("adaptive_tbptt._torch.number_formats.NO_FLOAT64", {"elsewhere"})
    monkeypatch.setattr("tests.elsewhere.NO_FLOAT64", {"elsewhere"})
    data = torch.randn(80, 4, 3), torch.randn(80, 4, 4)

    def work(device):
        torch.manual_seed(0)
        found = diagnose_decay(make(3, 4).to(device), F.mse_loss, data, lags=30)
        return [found.stability.jacobian_norm, *(d.k for d in found.decisions)]

    with torch.backends.mkldnn.flags(enabled=False):
        here = work(torch.device("cpu"))
    with other_device() as device:
        assert work(device) == pytest.approx(here, rel=1e-5)
