"""The page's pictures in docs/images: `python -m tests.rstar_ray.pictures RUN [--out FOLDER]`.

With `--out` it takes every section there, light and dark, wide and narrow: what a person should look at after a change.
"""

import argparse
import asyncio
import shutil
import tempfile
from pathlib import Path

from rstar_ray.report.write import write_report
from tests.chromium import Tab, tab

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
RECOVERED = "#trajectories?stage=stage1&step=1&tool=recovered&verdict=right"
LOOK = "[...document.querySelectorAll('.looks button')].find(button => button.textContent === 'log-prob').click()"
SECTIONS = "[...document.querySelectorAll('main section')].map(section => section.id)"
SIZES = {"wide": (1280, 1000), "narrow": (390, 844)}


async def trajectory(page: Tab) -> None:
    """A right answer after a failed call, its tokens coloured."""
    await page.until("browser.shown.length && document.querySelector('.looks button')")
    await page.evaluate(LOOK)


async def for_docs(page: Tab, report: Path) -> None:
    await page.sized(*SIZES["wide"])
    await page.open(f"file://{report}")
    await page.picture(IMAGES / "watching.png", width=1280, height=1000)
    await page.open(f"file://{report}{RECOVERED}")
    await trajectory(page)
    await page.picture(IMAGES / "trajectory.png", width=1280, height=1000)


async def everything(page: Tab, report: Path, out: Path) -> None:
    for size, (width, height) in SIZES.items():
        for dark in (False, True):
            await page.sized(width, height, dark=dark)
            await page.open(f"file://{report}")
            for section in ["", *await page.evaluate(SECTIONS)]:
                target = f"document.getElementById('{section}')" if section else "document.body"
                await page.evaluate(f"{target}.scrollIntoView()")
                name = f"{size}-{'dark' if dark else 'light'}-{section or 'top'}.png"
                await page.picture(out / name, width=width, height=height, dark=dark)


async def take(run: Path, out: Path | None) -> None:
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(run, Path(place) / "tiny", ignore=shutil.ignore_patterns("checkpoints")))
        report = write_report(copy).html_path
        async with tab(Path(place) / "profile") as page:
            await (everything(page, report, out) if out else for_docs(page, report))
            assert page.complaints == []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(asked.run, asked.out))


if __name__ == "__main__":
    main()
