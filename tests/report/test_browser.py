"""The report in a real browser."""

import json
from itertools import pairwise

import pytest

from adaptive_tbptt.report.curves import MOST_POINTS
from adaptive_tbptt.report.page import write_run_report

from ..chromium import Chromium, find_chromium
from .test_page import data_of, write_run

pytest.importorskip("plotly", reason="it needs the extra: pip install 'adaptive-tbptt[report]'")

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed"),
    pytest.mark.xdist_group("chromium"),
]
CHARTS = {"loss", "k", "beta", "bias", "asked", "decay"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    checks = [(2, 5, 0.05, 0.04, 0.07), (4, 7, 0.12, 0.1, 0.15)]
    return write_run_report([write_run(tmp_path_factory.mktemp("one") / "run", checks=checks)])


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    runs = [
        write_run(folder / "copy-delta-0.1"),
        write_run(folder / "copy_delta_0.5_with_a_long_name", delta=0.5, beta=0.6, epochs=9),
        write_run(folder / "copy-k-10", delta=None),
    ]
    return write_run_report(runs, folder / "report.html")


# What a person would look for: text over text, text cut off, charts without a drawing.
LOOK = """(() => [...document.querySelectorAll(".chart")].map((chart) => {
  const box = chart.getBoundingClientRect();
  const texts = [...chart.querySelectorAll("text")].filter((t) => t.textContent.trim())
    .map((t) => [t.textContent, t.getBoundingClientRect()]);
  const wrong = [];
  texts.forEach(([text, a], i) => {
    if (a.left < box.left - 1 || a.right > box.right + 1 || a.top < box.top - 1 ||
        a.bottom > box.bottom + 1) wrong.push(text + " is cut off");
    texts.slice(0, i).forEach(([other, b]) => {
      const over = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const under = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (over > 2 && under > 2) wrong.push(text + " lies on " + other);
    });
  });
  const titles = ["x", "y"].map((a) => chart.querySelector("." + a + "title")?.textContent || "");
  const drawn = [...chart.querySelectorAll(".trace path")].filter((p) => {
    const shape = p.getBoundingClientRect();
    return shape.width + shape.height > 3;
  }).length;
  return {id: chart.id, wrong, titles, drawn};
}))()"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("which", ["one", "three"])
def test_it_opens_without_complaint_and_looks_right(which, width, browser, request):
    page = browser.open(request.getfixturevalue(which), width)
    charts = page.run(LOOK)
    assert {chart["id"] for chart in charts} == CHARTS
    for chart in charts:
        assert chart["wrong"] == []
        assert chart["drawn"] > 0, chart
        assert all(chart["titles"]), chart
    for what, title in (("k", "K (steps)"), ("bias", "relative bias (fraction)")):
        assert next(c for c in charts if c["id"] == what)["titles"][1] == title
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.complaints() == []


def test_the_complaints_of_a_page_are_heard(browser, tmp_path):
    """The test above would pass on anything if they were not."""
    bad = tmp_path / "bad.html"
    bad.write_text("<script>console.error('oh'); fetch('http://localhost:9/'); oh()</script>")
    page = browser.open(bad)
    text = json.dumps(page.complaints())
    assert "oh is not defined" in text
    assert "http://localhost:9/" in text


def test_the_slider_moves_by_keyboard_and_says_where_it_is(one, browser):
    page = browser.open(one)
    frames = data_of(one)["frames"]["runs"][0]
    shown = "(() => { const t = document.getElementById('decay').data; return t[1].y })()"
    assert page.run(shown) == frames[-1]["curves"][0][1]
    page.run("document.getElementById('moment').focus()")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert page.run("document.getElementById('moment').value") == "2"
    assert page.run(shown) == frames[2]["curves"][0][1] != frames[-1]["curves"][0][1]
    said = page.run("document.getElementById('moment').getAttribute('aria-valuetext')")
    assert said == frames[2]["says"]
    assert page.run("document.getElementById('moment-says').textContent") == said
    # What is drawn moves too, not only what Plotly holds.
    path = (
        "document.querySelectorAll('#decay .trace')[1].querySelector('.js-line').getAttribute('d')"
    )
    before = page.run(path)
    page.press("ArrowRight")
    assert page.run(path) != before


def test_runs_compare_and_can_be_hidden_by_keyboard(three, browser):
    page = browser.open(three)
    visible = """['loss', 'k', 'bias', 'decay'].map((id) => [...new Set(document.getElementById(id)
      .data.filter((t) => t.visible !== false).map((t) => t.meta.run))].sort())"""
    assert page.run(visible) == [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1]]
    page.run("document.querySelectorAll('input[name=run]')[1].focus()")
    page.press(" ")
    assert page.run(visible) == [[0, 2], [0, 2], [0], [0]]
    page.press(" ")
    assert page.run(visible)[0] == [0, 1, 2]


def test_before_its_first_estimate_a_run_shows_no_decay(three, browser):
    page = browser.open(three)
    # The longer run has its last estimate at 8 epochs, the other at 5: it stays there.
    assert "copy-delta-0.1: after 5 epochs" in page.run(
        "document.getElementById('moment-says').textContent"
    )
    assert page.complaints() == []


def test_the_axis_changes_to_time_and_back(three, browser):
    page = browser.open(three)
    title = "document.querySelector('#loss .xtitle').textContent"
    last = "document.getElementById('loss').data[0].x.at(-1)"
    assert (page.run(title), page.run(last)) == ("epochs (passes over the data)", 6)
    page.run("document.querySelector('input[value=time]').click()")
    assert (page.run(title), page.run(last)) == ("training time (s)", 12)
    page.run("document.querySelector('input[value=epoch]').click()")
    assert (page.run(title), page.run(last)) == ("epochs (passes over the data)", 6)
    assert page.complaints() == []


def test_a_reader_without_a_mouse_or_a_screen_finds_everything(three, browser):
    page = browser.open(three)
    page.press("Tab")
    assert page.run("document.activeElement.textContent") == "Skip to the report"
    levels = page.run("[...document.querySelectorAll('h1,h2,h3')].map((h) => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    unnamed = """[...document.querySelectorAll('input')].filter((i) => !i.labels.length).length
      + [...document.querySelectorAll('[aria-labelledby],[aria-describedby]')].filter((e) =>
          ['aria-labelledby', 'aria-describedby'].some((a) => e.hasAttribute(a)
            && !document.getElementById(e.getAttribute(a)).textContent.trim())).length
      + [...document.querySelectorAll('th')].filter((h) => !h.scope).length"""
    assert page.run(unnamed) == 0
    assert page.run("[...document.querySelectorAll('.chart')].every((c) => c.role === 'img')")


def test_it_prints_at_the_width_of_paper_with_everything_unfolded(one, browser, tmp_path):
    page = browser.open(one)
    state = """[document.querySelector('#loss .main-svg').clientWidth,
      document.querySelector('details').open]"""
    before = page.run(state)
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.run(state) == [680, True]
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.run(state) == before
    page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert page.complaints() == []


def test_a_run_of_100_000_points_stays_responsive(tmp_path, browser):
    path = write_run_report([write_run(tmp_path / "run", epochs=100_000, lags=5)])
    data = data_of(path)
    assert len(json.dumps(data)) < 1_000_000
    for figure in data["figures"].values():
        assert all(len(trace["y"]) <= MOST_POINTS for trace in figure["data"])
    page = browser.open(path)
    took = page.run("""(async () => {
      const slider = document.getElementById('moment'), began = performance.now();
      slider.value = 3;
      slider.dispatchEvent(new Event('input'));
      document.querySelector('input[value=time]').click();
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      return performance.now() - began;
    })()""")
    assert took < 10_000  # a limit against hanging: it takes well below a second
    assert page.run("document.querySelector('#loss .xtitle').textContent") == "training time (h)"
    assert page.complaints() == []
