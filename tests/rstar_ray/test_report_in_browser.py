"""The report page in a real headless Chromium: it opens, filters and shows without a word on the console."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rstar_ray.report.page import html_report
from rstar_ray.report.run_record import read_run
from rstar_ray.run_dir.ledger import RolloutStatus, append_ledger
from tests.chromium import CHROMIUM, Pages, Tab
from tests.rstar_ray.fabricate import run_directory

pytestmark = [
    pytest.mark.isolated,
    pytest.mark.usefixtures("without_fsync"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    opened = Pages(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the report of a run with a recorded step, one that only the ledger knows, and a dropped rollout."""
    path = run_directory(tmp_path_factory.mktemp("page") / "run", stages={"stage1": 12})
    recorded = {f"stage1/1/{name}": RolloutStatus.TRAINED for name in ("gcd-17/0", "sum-3/0", "evil/0")}
    recorded |= {"stage1/1/gcd-17/1": RolloutStatus.RESAMPLED_AWAY, "stage1/1/gcd-17/2": RolloutStatus.DROPPED}
    append_ledger(path, recorded, stage="stage1", step=1, reasons={"stage1/1/gcd-17/2": "no sandbox"},
                advantages={"stage1/1/sum-3/0": 0.5})  # fmt: skip
    named = {f"stage1/2/0-p/{n}": RolloutStatus.TRAINED if n else RolloutStatus.EQUAL_REWARDS for n in range(4)}
    append_ledger(path, named, stage="stage1", step=2, reasons={}, advantages={})
    (path / "report.html").write_text(html_report(read_run(path)), "utf-8")
    return f"file://{path}/report.html"


LISTED = "[...document.querySelectorAll('.row .q')].map(row => row.textContent)"


def test_a_shared_address_finds_words_that_were_said(address: str, pages: Pages):
    async def look(page: Tab) -> None:
        await page.open(f"{address}#trajectories?q=not+defined")
        await page.until("browser.shown.length === 3")

    pages.walk(look)


def test_the_page_opens_filters_and_shows_without_a_complaint(address: str, pages: Pages):
    async def look(page: Tab) -> None:
        await page.open(address)
        assert len(await page.evaluate(LISTED)) == 12
        await page.evaluate("browser.set({ status: 'trained', tool: 'failed' })")
        assert await page.evaluate(LISTED) == [
            "Sum the squares from 1 to 12.",
            "Is 1 < 2 & 3 > 2? <script>alert(1)</script>",
        ]
        # What was shown first is another trajectory's.
        await page.until("document.querySelector('.detail').innerText.includes('trained on')")
        shown = await page.evaluate("document.querySelector('.detail').innerText")
        for said in ("reward 1", "trained on", "advantage 0.5", "NameError", "right answers", "3 turns"):
            assert said in shown, said
        assert await page.evaluate("document.querySelector('.detail .code .called').textContent") == "print"
        await page.evaluate("browser.set({ q: 'not defined' }, true)")
        await page.evaluate("browser.readAll()")
        await page.until("browser.shown.length === 3")  # what a tool said is found too

    pages.walk(look)


def test_tokens_are_coloured_and_siblings_stand_side_by_side(address: str, pages: Pages):
    async def look(page: Tab) -> None:
        await page.open(address)
        await page.evaluate("browser.set({ problem: 'gcd-17', file: 'stage1-step-000001.jsonl' })")
        await page.until("document.querySelectorAll('.looks button').length === 7")
        legends = set[str]()
        for look, title in (
            ("entropy", "entropy 0.25 nats where it was drawn"),
            ("learner − engine", "the learner's log-prob less the engine's: 1e-5 nats"),
            ("log-prob", "-0.49 nats, probability 61.0 %"),
        ):
            await page.evaluate(
                f"[...document.querySelectorAll('.looks button')].find(b => b.textContent === '{look}').click()"
            )
            assert await page.evaluate("document.querySelector('.seg .tok').title") == title
            legends.add(await page.evaluate("document.querySelector('.looks .label:last-child').textContent"))
        assert len(legends) == 3
        assert await page.evaluate("document.querySelector('.detail .placements').innerText") == (
            "Waited 2.5 s, 1.5 s because no replica has room in its KV cache for the next in line; then generation/0: "
            "most room by expected KV. KV there: 25 % in use, 75 % counted on, of 2,048 tokens, 12 rollouts with this "
            "one."
        )
        text = await page.evaluate("[...document.querySelectorAll('.turn .tok')].map(t => t.textContent).join('')")
        assert text.startswith("Let me compute it.\n<tool_call>") and text.endswith("<|im_end|>")
        await page.evaluate("browser.set({ problem: 'evil', file: 'stage1-step-000001.jsonl' }, true)")
        await page.until("document.querySelectorAll('.looks button').length === 5")  # the learner did not see it
        await page.evaluate("browser.set({ problem: 'gcd-17', file: 'stage1-step-000001.jsonl' }, true)")
        await page.until("document.querySelectorAll('.looks button').length === 7")
        await page.evaluate("document.querySelector('.siblings .sib:not(.here)').click()")
        await page.until("document.querySelector('.siblings .sib + .sib.here')")
        assert await page.evaluate("document.querySelector('.prompt pre').textContent")  # the second sibling has it too
        await page.evaluate("[...document.querySelectorAll('.siblings button')].at(-1).click()")
        await page.until("document.querySelectorAll('.column').length === 2")
        assert "The same problem over the run" in await page.evaluate("document.querySelector('.same').innerText")

    pages.walk(look)


def test_every_count_of_the_ledger_is_a_link_to_its_rollouts(address: str, pages: Pages):
    async def follow(page: Tab, link: str) -> Any:
        await page.evaluate(f"[...document.querySelectorAll('#ledger a')].find(a => a.href.includes('{link}')).click()")
        await page.until("location.hash.startsWith('#trajectories')")
        await asyncio.sleep(0.2)
        return await page.evaluate(
            "browser.shown.map(item => typeof item === 'number' ? browser.store.id(item) : item.id)"
        )

    async def look(page: Tab) -> None:
        await page.open(address)
        heads = await page.evaluate("[...document.querySelectorAll('#ledger th')].map(head => head.textContent)")
        assert "abandoned" in heads and all(heads), heads
        assert await follow(page, "stage=stage1&status=resampled_away") == ["gcd-17/1"]
        assert await follow(page, "stage=stage1&status=dropped") == ["gcd-17/2"]
        assert "no sandbox" in await page.evaluate("document.querySelector('.detail').innerText")
        assert await follow(page, "stage=stage1&step=2&status=trained") == ["0-p/1", "0-p/2", "0-p/3"]
        assert "was not recorded" in await page.evaluate("document.querySelector('.detail').innerText")

    pages.walk(look)


def test_a_rollout_that_only_the_ledger_names_is_of_the_problem_with_its_whole_id(address: str, pages: Pages):
    async def look(page: Tab) -> None:
        await page.open(address)
        ids = ["0-sum-3/0", "12-sum-3/1/again-2", "stage1/7/3-sum-3/0", "0-sum-33/0", "0-um-3/0", "3-x/0", "sum-3/0"]
        found = await page.evaluate(
            f"{ids}.map(id => browser.store.problemOf(id)).map(at => at < 0 ? '' : browser.store.problems[at][0])"
        )
        assert found == ["sum-3", "sum-3", "sum-3", "", "", "", ""]

    pages.walk(look)


def test_an_address_with_a_filter_opens_there_and_a_narrow_page_does_not_overflow(address: str, pages: Pages):
    async def look(page: Tab) -> None:
        await page.sized(390, 800, dark=True)
        await page.open(f"{address}#trajectories?stage=stage1&verdict=wrong")
        assert await page.evaluate("browser.wanted.verdict") == "wrong"
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 26)"
        scale = "svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width"
        drawn = await page.evaluate(f"[...document.querySelectorAll('.card > svg')].map({scale})")
        assert min(drawn) > 0.9  # letters in a drawing are as large as they are elsewhere
        beyond = "(rows => rows.scrollWidth - rows.clientWidth)(document.querySelector('.checks'))"
        assert await page.evaluate(beyond) <= 0

    pages.walk(look)
