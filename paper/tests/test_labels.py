"""Names beside curves: in the order of the curves, apart, in the curves' colours."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from atbptt_paper.experiments.paper import experiment
from atbptt_paper.experiments.plots import _curves, _repeats
from atbptt_paper.labels import label_ends, leave_out_the_start, spread
from paper_helpers import fake, table_cells


def axes_with(*curves):
    axes = Figure(figsize=(5, 3), layout="constrained").subplots()
    for i, curve in enumerate(curves):
        axes.plot(curve, label=f"curve {i}", color=f"C{i}")
    return axes


def test_names_stand_in_the_order_of_the_ends_and_do_not_overlap():
    axes = axes_with([0, 1.0], [0, 1.0], [5, 0.0], [2, 0.99], [1, np.nan])
    names = label_ends(axes)
    assert names[:2] == ["curve 2", "curve 3"]
    assert set(names[2:]) == {"curve 0", "curve 1", "curve 4"}  # at 1, the NaN left out
    axes.figure.draw_without_rendering()
    texts = {text.get_text(): text for text in axes.texts}
    heights = [texts[name].xyann[1] * axes.bbox.height for name in names]
    assert np.diff(heights).min() >= 9 / 72 * axes.figure.dpi
    for i in range(5):
        assert texts[f"curve {i}"].get_color() == f"C{i}"


def test_a_line_without_a_point_or_a_name_gets_no_text():
    axes = axes_with([np.nan, np.nan], [1.0, 2.0])
    axes.axhline(1.5)
    assert label_ends(axes) == ["curve 1"]


def test_numbers_move_as_little_as_needed():
    assert spread([0.0, 1.0], 0.1).tolist() == [0.0, 1.0]
    np.testing.assert_allclose(spread([0.5] * 4, 0.2), [0.2, 0.4, 0.6, 0.8])
    np.testing.assert_allclose(spread([0.0, 0.01, 0.9], 0.2), [0.0, 0.2, 0.9])
    np.testing.assert_allclose(spread([0.9, 1.0, 1.0], 0.2), [0.6, 0.8, 1.0])
    rng = np.random.default_rng(0)
    moved = spread(sorted(rng.random(20)), 0.04)
    assert np.diff(moved).min() >= 0.04 - 1e-12


def test_the_start_of_a_curve_does_not_stretch_the_axis():
    falling = [10_000.0, *np.linspace(20.0, 10.0, 39)]
    axes = axes_with(falling, np.linspace(30.0, 12.0, 40))
    assert leave_out_the_start(axes)
    assert axes.get_ylim()[1] < 40
    axes = axes_with([*falling[:20], 5000.0, *falling[21:]])
    leave_out_the_start(axes, most=10.0)
    assert axes.get_ylim()[1] < 120
    assert not leave_out_the_start(axes_with([np.nan, np.nan]))


@pytest.mark.parametrize("name", ["copy-fixed", "copy-gauges", "ptb-small-gauges", "book-order"])
def test_no_panel_has_more_than_six_curves_or_a_legend(name):
    e = experiment(name)
    cells = table_cells() if e.deltas else [fake(n, 0, 1.04) for n in e.variants]
    if name == "book-order":
        cells = [fake(n, 0, 1.04) for n in e.settings]
        for cell in cells:
            cell["curves"]["test_nll"] = cell["curves"]["test_ppl"]
            cell["test_nll"] = cell["test_ppl"]
    metric = list(e.metrics)[1]
    figures = [_curves(e, cells, metric, metric)]
    if e.deltas and name == "copy-fixed":
        figures += [_repeats(e, cells, n, n) for n in ("k", "relative_bias")]
    for figure in figures:
        shown = [axes for axes in figure.axes if axes.get_visible()]
        names = {text.get_text().partition(",")[0] for axes in shown for text in axes.texts}
        names |= {axes.get_title().partition(" (")[0] for axes in shown}
        for axes in shown:
            assert axes.get_legend() is None
            assert len(axes.get_lines()) <= 6
        if figure is figures[0]:
            assert {setting.partition(",")[0] for setting in e.settings} <= names
