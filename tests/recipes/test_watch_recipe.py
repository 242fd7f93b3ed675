"""The page of a run that is under way, served to those who know its token."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from recipes.watch import main
from rstar_ray.run_dir.durable import append_row
from tests.chromium import CHROMIUM, Tab, tab
from tests.rstar_ray.fabricate import run_directory

pytestmark = [pytest.mark.isolated, pytest.mark.usefixtures("without_fsync")]
REPOSITORY = Path(__file__).resolve().parent.parent.parent
ALLOWED = {"Authorization": "Bearer secret"}


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return run_directory(tmp_path / "run", stages={"stage1": 12})


def served(run: Path, look: Callable[[str], Awaitable[None]]) -> None:
    """With recipes/watch.py over the run, as a person starts it."""

    async def looked() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "recipes/watch.py", str(run), "--port", "0",
            env=os.environ | {"RSTAR_RAY_TOKEN": "secret"},
            cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), 180)).decode()
            address, _, rest = line.partition("/#token=secret shows ")
            assert rest.strip() == str(run)
            await look(address)
        finally:
            process.terminate()
            await process.wait()

    asyncio.run(looked())


def test_figures_are_given_to_those_with_the_token_and_to_no_other_page(run_path: Path):
    async def look(address: str) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.get(address) as page:
                text = await page.text()
                assert page.status == 200 and "stage1" not in text and 'id="data"></script>' in text
                assert page.headers["X-Frame-Options"] == "DENY"
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer other"}, 401),
                (ALLOWED | {"Host": "evil.example"}, 421),
                (ALLOWED | {"Origin": "http://evil.example"}, 403),
                (ALLOWED | {"Sec-Fetch-Site": "cross-site"}, 403),
                (ALLOWED, 200),
            ):
                async with session.get(f"{address}/data", headers=headers) as answer:
                    assert answer.status == status, headers
            async with session.get(address, headers={"Host": "evil.example"}) as page:
                assert page.status == 421

    served(run_path, look)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
def test_a_browser_sees_a_step_as_it_ends_and_stays_where_it_was(run_path: Path, tmp_path: Path):
    async def look(address: str) -> None:
        async with tab(tmp_path / "profile") as page:
            await page.sized(1280, 900)
            await page.open(f"{address}/#token=secret")
            assert await page.evaluate("location.href") == f"{address}/"  # the token is no longer to be seen
            assert "step 12" in await page.evaluate("document.querySelector('#state').textContent")
            await page.evaluate("browser.set({ tool: 'failed' }).then(() => browser.select(2))")
            await page.until("document.querySelector('.detail .seg')")
            before = await page.evaluate("browser.keyNow()")
            last = json.loads((run_path / "metrics.jsonl").read_text().splitlines()[-1])
            append_row(run_path / "metrics.jsonl", last | {"step": 13, "reward_mean": 0.0})
            await page.until("document.querySelector('#state').textContent.includes('step 13')")
            assert await page.evaluate("browser.keyNow()") == before
            assert await page.evaluate("browser.wanted.tool") == "failed"
            await sees_refusal(page, address)

    async def sees_refusal(page: Tab, address: str) -> None:
        assert page.complaints == []
        await page.evaluate("sessionStorage.setItem('token', 'wrong')")
        await page.call("Page.navigate", url=f"{address}/?again")
        await page.until("document.querySelector('h1')?.textContent === 'This page cannot be shown'")
        assert "401" in await page.evaluate("document.querySelector('.lead').textContent")

    served(run_path, look)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium")
def test_the_live_page_answers_the_mouse(run_path: Path, tmp_path: Path):
    """The slowest step, a filter, a wrong rollout, its siblings beside it and its tokens in colour."""

    async def look(address: str) -> None:
        async with tab(tmp_path / "profile") as page:
            await page.sized(1280, 900)
            await page.open(f"{address}/#token=secret")
            second = "document.querySelectorAll('.slowest button')[1]"
            shown = f"document.querySelector('.why-slow .head').textContent === {second}.textContent"
            assert not await page.evaluate(shown)  # the slowest is shown first
            await page.click(second)
            await page.until(shown)
            all_rows = await page.evaluate("browser.shown.length")
            choose = "(field => { field.value = 'wrong'; field.dispatchEvent(new Event('change')); field.blur(); })"
            await page.evaluate(f"{choose}(browser.fields.verdict)")
            await page.until(f"0 < browser.shown.length && browser.shown.length < {all_rows}")
            await page.click("document.querySelector('.row')")
            await page.until("document.querySelector('.detail .seg')")
            assert "reward 0" in await page.evaluate("document.querySelector('.detail').innerText")
            await page.click("[...document.querySelectorAll('.chip')].at(-1)")  # takes the filter away
            await page.until(f"browser.shown.length === {all_rows}")
            await page.click("[...document.querySelectorAll('.looks button')].find(b => b.textContent === 'log-prob')")
            await page.until("document.querySelector('.seg .tok').title.includes('probability')")
            assert page.complaints == []

    served(run_path, look)


def test_what_cannot_be_served_is_one_line_with_the_fix(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert capsys.readouterr().err.endswith(
        "holds no metrics and no evaluations. Hint: name the directory of a run, or wait until it has begun\n"
    )
    assert main([str(tmp_path / "nowhere")]) == 2
    assert main([str(run_path), "--port", "70000"]) == 2
    assert "give 1 to 65535, or 0 for any" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main([str(run_path), "--port", str(taken.getsockname()[1])]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot be used" in said and "give another" in said
