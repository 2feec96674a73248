"""`python -m benchmarks.truth`: is the answer of `diagnose` right on models that nobody here wrote?

Every case is a file of its own in the results folder; finished ones are not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import adaptive_tbptt as at

from .brute_force import true_bias
from .models import CASES, Case, tmaze

OUT = Path(__file__).parents[1] / "results" / "truth"
LAGS, BURN_IN, WINDOWS = 128, 20, 1600


def main() -> None:
    """Run the cases that are missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="one case")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of brute force, per row")
    parser.add_argument("--seconds", type=float, default=None, help="instead of the default")
    parser.add_argument("--seed", type=int, default=0, help="of diagnose")
    parser.add_argument(
        "--again",
        action="store_true",
        help="measure finished cases again; the brute force of the same parameters is kept",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    (options.out / "cells").mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        if options.only in (None, name):
            for trained in (False, True):
                stage = "trained" if trained else "untrained"
                cell = options.out / "cells" / f"{_slug(name)}-{stage}-{options.seed}.json"
                if options.again or not cell.exists():
                    known = json.loads(cell.read_text()) if cell.exists() else None
                    found = _run(name, case, trained, options, known)
                    cell.write_text(json.dumps(found, indent=1) + "\n")
                    print(cell.name, found["seconds"], flush=True)
    write_table(options.out)


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def _run(
    name: str, case: Case, trained: bool, options: Any, known: dict[str, Any] | None
) -> dict[str, Any]:
    torch.manual_seed(7)
    model, data = case.model(), case.data()
    stream = at.SequenceStream(*data)
    epoch = _train(case, model, stream, case.epochs if trained else 1, keep=trained)
    if name.startswith("PPO") and trained:  # the rollout of the agent that was trained
        data = tmaze(model)
        stream = at.SequenceStream(*data)
    budget = max(30.0, epoch / 4) if options.seconds is None else options.seconds
    began = time.process_time()
    found = at.diagnose(
        model,
        case.loss,
        stream,
        losses=case.losses,
        lags=LAGS,
        seconds=budget,
        sampling=at.diagnosis.Sampling(burn_in=BURN_IN, level=0.9, seed=options.seed),
        show=False,
    )
    took = time.process_time() - began
    windows = options.windows if case.mean else options.windows // 4
    fingerprint = _fingerprint(model)
    if known is not None and known.get("parameters") == fingerprint:
        truth, error = ([row[key] for row in known["rows"]] for key in ("truth", "truth_error"))
    else:
        truth, error = true_bias(case, model, data, found.curve.contexts, BURN_IN, windows)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "name": name,
        "trained": trained,
        "losses": case.losses,
        "epoch_seconds": epoch,
        "seconds": took,
        "samples": found.curve.samples,
        "rows": [
            {**{k: _plain(v) for k, v in row._asdict().items()}, "truth": t, "truth_error": e}
            for row, t, e in zip(found.rows, truth, error, strict=True)
        ],
        "recommendation": found.recommendation,
        "parameters": fingerprint,
        "commit": commit,
    }


def _fingerprint(model: torch.nn.Module) -> str:
    """Identify the parameters that were diagnosed."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _train(case: Case, model: Any, stream: Any, epochs: int, *, keep: bool) -> float:
    """Train with the loop that is diagnosed; return the processor time of an epoch."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), case.rate)
    loop = at.AdaptiveTBPTT(model, case.loss, 0, losses=case.losses)
    began = time.process_time()
    for _ in range(epochs):
        for window in loop.windows(stream):
            window.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    seconds = (time.process_time() - began) / epochs
    if not keep:
        model.load_state_dict(before)
    return seconds


def write_table(out: Path) -> None:
    """Write `table.md`: every row, and what they add up to."""
    cells = [json.loads(p.read_text()) for p in sorted((out / "cells").glob("*.json"))]
    lines = ["| model | losses | context: true bias, measured [interval] | covered | seconds |"]
    lines.append("|---|---|---|---|---|")
    rows, covered, wide, notable = 0, 0, 0, 0
    for cell in cells:
        texts, inside = [], 0
        for row in cell["rows"]:
            rows += 1
            resolved = row["high"] is not None
            slack = 2 * row["truth_error"]  # brute force has an error of its own
            ok = (
                row["low"] - slack <= row["truth"] <= row["high"] + slack
                if resolved
                else row["truth"] <= 0.05
            )
            inside += ok
            if row["truth"] > 0.05:
                notable += 1
                wide += not resolved or (row["high"] - row["low"]) / 2 > 0.25 * row["bias"]
            if row["context"] in (0, 1, 8, 32):
                seen = (
                    f"{row['bias']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" if resolved else "?"
                )
                texts.append(f"{row['context']}: {row['truth']:.3f}, {seen}")
        covered += inside
        stage = "trained" if cell["trained"] else "untrained"
        lines.append(
            f"| {cell['name']}, {stage} | {cell['losses']} | {'; '.join(texts)} | "
            f"{inside} of {len(cell['rows'])} | {cell['seconds']:.0f} |"
        )
    summary = (
        f"{covered} of {rows} rows covered ({covered / max(rows, 1):.0%}); of {notable} rows with "
        f"a true bias above 0.05, {wide} have an interval wider than +-25 %"
    )
    (out / "table.md").write_text("\n".join([summary, "", *lines]) + "\n")
    print(summary, file=sys.stderr)


if __name__ == "__main__":
    main()
