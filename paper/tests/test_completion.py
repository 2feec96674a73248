"""What the shell completes for `atbptt-paper`."""

import pytest
from tests.command_line import complete

from atbptt_paper.cli import app


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("re", ["reproduce"]),
        ("train ", ["copy", "language", "point-process"]),
        ("train copy --preset paper-", ["paper-variable", "paper-text"]),
        ("train copy --preset nonsense --k", ["--k", "--k-init", "--k-min", "--k-max", "--k-fall"]),
        ("train copy --weight", ["--weight-decay"]),  # not in the short help
        ("train copy --gauge ", ["paper", "release", "measured"]),
        ("train language --cell ", ["lstm", "gru", "rnn"]),
        ("train language --dataset ", ["text", "ptb", "wikitext-2"]),
        ("train copy --optimizer a", ["adadelta", "adam"]),
        ("find-lr p", ["point-process"]),
        ("find-lr copy --preset q", ["quick"]),
        ("find-lr language --preset ", ["ptb", "wikitext-2", "ptb-small", "wikitext-2-small"]),
        ("find-lr copy --rule ", ["loss", "paper"]),
        ("reproduce copy-f", ["copy-fixed"]),
        ("reproduce ptb --preset ", ["paper"]),
        ("reproduce copy-fixed --preset ", ["paper", "quick"]),
        ("reproduce copy-fixed --only K=1", ["K=10", "K=15"]),
        ("reproduce copy-fixed --executor ", ["local", "ray"]),
        ("findings wiki", ["wikitext-2", "wikitext-2-small"]),
    ],
)
def test_names_are_completed(line, found):
    assert complete(app, "atbptt-paper", line) == found
