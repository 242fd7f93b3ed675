"""The page of a long run: how long it takes to write, how large it is, how soon it is seen, how fast it filters.

`python -m tests.rstar_ray.test_report_size` prints the figures.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.report.write import write_report
from tests.chromium import CHROMIUM, tab
from tests.rstar_ray.large_run import large_run

MOST_MEGABYTES = 20.0
FILTERS = (
    {"verdict": "wrong"}, {"status": "resampled_away"}, {"tool": "failed", "sort": "failed"}, {"sort": "longest"},
    {"q": "problem-0003"}, {"stage": "stage2", "verdict": "right", "min": "100"}, {},
)  # fmt: skip


def figures(folder: Path) -> dict[str, Any]:
    """Of 500 steps with 2,000 trajectories of 8K tokens, in a headless Chromium."""
    path = large_run(folder / "large")
    recorded = sum(file.stat().st_size for file in (path / "trajectories").iterdir())
    started_s = time.perf_counter()
    report = write_report(path)
    written_s = time.perf_counter() - started_s
    seen = asyncio.run(_seen(report.html_path, folder / "profile"))
    return {
        "recorded_megabytes": recorded / 1e6,
        "written_s": written_s,
        "megabytes": report.html_path.stat().st_size / 1e6,
        **seen,
    }


async def _seen(page: Path, profile: Path) -> dict[str, Any]:
    async with tab(profile) as opened:
        await opened.sized(1280, 900)
        await opened.open(f"file://{page}")
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        await opened.until(paint)
        filtered = [await opened.evaluate(_timed(wanted)) for wanted in FILTERS]
        await opened.evaluate("browser.readAll()")
        searched = [await opened.evaluate(_timed({"q": words})) for words in ("zzzzzz", "total += n", "e t")]
        found = {
            "first_paint_ms": await opened.evaluate(paint),
            "filter_ms": max(filtered),
            "search_ms": max(searched),
            "rows": await opened.evaluate("browser.store.length"),
            "texts": await opened.evaluate("browser.store.texts.size"),
        }
        assert opened.complaints == []
        return found


def _timed(wanted: dict[str, str]) -> str:
    """From the choice to the list as it is drawn."""
    return (
        f"(async () => {{ const began = performance.now(); await browser.set({json.dumps(wanted)}, true);"
        " browser.items.getBoundingClientRect(); return performance.now() - began; })()"
    )


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
@pytest.mark.usefixtures("without_fsync")
def test_the_page_of_a_long_run_is_small(tmp_path: Path):
    found = figures(tmp_path)
    assert found["rows"] == 2_000 and found["texts"] >= 400
    assert found["megabytes"] <= MOST_MEGABYTES


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        json.dump({name: round(value, 2) for name, value in figures(Path(place)).items()}, sys.stdout)
        print()
