"""What the shell completes for `atbptt-paper`."""

import pytest
from typer.testing import CliRunner

from atbptt_paper.cli import app


def complete(line):
    """Return what bash completes after the words of a line; the last one may be incomplete."""
    words = f"atbptt-paper {line}"
    env = {
        "_ATBPTT_PAPER_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = CliRunner().invoke(app, [], env=env, prog_name="atbptt-paper")
    assert done.exit_code == 0, done.output
    return done.output.split()


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
    assert complete(line) == found
