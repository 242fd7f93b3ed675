"""From `--tools.use` to tools; the examples of docs/tools.md are loaded and played."""

import re
import time
from pathlib import Path

import pytest

from rstar_ray.errors import ConfigError
from rstar_ray.outcome import Outcome
from rstar_ray.tools import loader as load
from rstar_ray.tools.host import HostCall, ToolHost
from rstar_ray.tools.loader import check_environment, load_environment, load_tools, tool_specs
from rstar_ray.trajectory import Problem

PAGE = Path(__file__).parents[3] / "docs" / "tools.md"
MANY = """
import sys, time
from rstar_ray.tools.tool import Tool
print("noise on stdout")
async def f() -> str: return ""
def tool(name): return Tool(name=name, description="?", parameters={"type": "object"}, function=f)
two = [tool("one"), tool("two")]
same = tool("python")
value = 7
misfit = lambda: None
class Partner:
    async def start(self, problem): ...
    async def reply(self, said): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        name = re.match(r"# (\w+\.py)", block)
        assert name is not None, "an example says which file it is"
        (tmp_path / name[1]).write_text(block)
    (tmp_path / "library.txt").write_text("The moon is far.\n\nThe sea is deep and blue.\n\nBread needs flour.")
    (tmp_path / "many.py").write_text(MANY)
    (tmp_path / "crashes.py").write_text("import os; os._exit(3)")
    (tmp_path / "raises.py").write_text("raise RuntimeError('no key\\nin the environment')")
    return tmp_path


def test_examples_of_the_page_are_tools_and_small(folder: Path):
    specs = tool_specs(["python", "search:search", "notebook:notebook"], str(folder))
    assert [(spec.name, spec.runs) for spec in specs] == [
        ("python", "python"),
        ("search", "actor"),
        ("notebook", "actor with state"),
    ]
    check_environment("guessing:Guessing", str(folder))
    for name in ("search.py", "notebook.py", "guessing.py"):
        lines = [line for line in (folder / name).read_text().splitlines() if line.strip()]
        assert len(lines) <= 34, name


async def test_examples_of_the_page_do_what_they_say(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(folder)
    search = ToolHost(load_tools("search:search")[0])
    found = await search.call(HostCall(arguments={"query": "how deep is the blue sea", "limit": 1}))
    assert (found.outcome, found.text) == (Outcome.OK, "The sea is deep and blue.")
    assert (await search.call(HostCall(arguments={"query": "zebra"}))).outcome is Outcome.ERROR

    notebook, problem = ToolHost(load_tools("notebook:notebook")[0]), Problem(id="p", problem="1+1", answer="7")
    wrote = await notebook.call(HostCall(arguments={"name": "a", "text": "b"}, rollout_id="r", problem=problem))
    elsewhere = ToolHost(load_tools("notebook:notebook")[0])
    read = await elsewhere.call(HostCall(arguments={"name": "a"}, rollout_id="r", problem=problem, memory=wrote.memory))
    assert (read.outcome, read.text) == (Outcome.OK, "b")

    game = load_environment("guessing:Guessing")()
    await game.start(problem)
    said = [await game.reply(guess) for guess in ("is it 5?", "9", "hm", "it is 7")]
    assert [reply.text for reply in said] == ["Higher.", "Lower.", "Say a number.", ""]
    assert said[-1].reward == pytest.approx(0.7)
    await game.start(problem)
    assert [(await game.reply("90")).text, await game.ended("max_turns")] == ["Lower.", 0.0]
    assert [(await game.reply("8")).text, await game.ended("truncated")] == ["Lower.", 0.1]


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        (
            ["absent:tool"],
            "--tools.use absent:tool: ModuleNotFoundError: No module named 'absent'. Hint: give module:object",
        ),
        (["many:absent"], "--tools.use many:absent: AttributeError"),
        (["many:value"], "--tools.use many:value: is neither a Tool nor a list of them"),
        (["raises:tool"], "--tools.use raises:tool: RuntimeError: no key in the environment. Hint: fix the module"),
        (["crashes:tool"], "--tools.use: its process ended. Hint: give module:object, and its folder as --own-folder"),
        (["python", "many:same"], "many:same and python are both named 'python'. Hint: rename one"),
    ],
)
def test_what_is_not_a_tool_is_refused_in_one_line(entries: list[str], complaint: str, folder: Path):
    with pytest.raises(ConfigError) as refused:
        tool_specs(entries, str(folder))
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


def test_a_module_that_hangs_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "hangs.py").write_text("while True: pass")
    monkeypatch.setattr(load, "IMPORT_DEADLINE_S", 0.3)
    with pytest.raises(ConfigError, match=r"--tools.use: importing hangs:tool takes over 0.3 s"):
        tool_specs(["hangs:tool"], str(folder))


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        ("def ended(self, reason)", "its method 'ended' is not async or does not take one argument"),
        ("async def ended(self)", "its method 'ended' is not async"),
        ("async def ended(self, a, b)", "its method 'ended' is not async"),
        ("def reply(self, said)", "its method 'reply' is not async"),
        ("async def start(self)", "its method 'start' is not async or does not take one argument"),
        ("def restore(self, snapshot)", "its method 'restore' is not async"),
        ("async def snapshot(self)", "its method 'snapshot' is async. Hint: write `def snapshot"),
        ("def __init__(self, problem)", "its constructor needs arguments"),
    ],
)
def test_an_environment_whose_methods_could_not_be_called_is_refused(method: str, complaint: str, folder: Path):
    methods = "".join(f"    async def {name}(self, *_): ...\n" for name in ("start", "reply", "close"))
    (folder / "ends.py").write_text(f"class Ends:\n{methods}    {method}: ...\n\none = object.__new__(Ends)\n")
    with pytest.raises(ConfigError) as refused:
        check_environment("ends:Ends", str(folder))
    assert f"ends:Ends: {complaint}" in str(refused.value)
    with pytest.raises(ConfigError, match="ends:one: is not a class"):
        check_environment("ends:one", str(folder))


def test_methods_of_an_environment_may_be_decorated_or_static(folder: Path):
    (folder / "plain.py").write_text(
        """
import functools

def logged(function):
    @functools.wraps(function)
    def inner(*arguments):
        return function(*arguments)
    return inner

class Plain:
    @logged
    async def start(self, problem): ...
    @staticmethod
    async def reply(said): ...
    async def close(self): ...
"""
    )
    check_environment("plain:Plain", str(folder))


PARTS = """
from rstar_ray.tools.tool import Tool

class State:
    def __init__(self, problem): ...
    async def call(self): ...

class Kept(State):
    def __init__(self, problem, snapshot): ...
    async def snapshot(self): ...

async def function(): ...

def made(**parts):
    return Tool(name="t", description="", parameters={"type": "object", "properties": {}}, **parts)
"""


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ("state=State", "its `state` cannot be called with (problem, snapshot)"),
        ("state=Kept", "its state's `snapshot` is async"),
        ("function=function, failed=lambda a, b: False", "its `failed` cannot be called with (answer)"),
    ],
)
def test_a_tool_whose_parts_could_not_be_called_is_refused(parts: str, complaint: str, folder: Path):
    (folder / "parts.py").write_text(f"{PARTS}\ntool = made({parts})\n")
    with pytest.raises(ConfigError) as refused:
        tool_specs(["parts:tool"], str(folder))
    assert complaint in str(refused.value)


def test_a_module_may_print_any_bytes_and_its_processes_end_with_its_import(folder: Path):
    starts = """
import pathlib, subprocess, sys
sys.stdout.buffer.write(b"caf\\xe9\\n"), sys.stderr.buffer.write(b"caf\\xe9\\n")
background = subprocess.Popen(["sleep", "300"])
pathlib.Path(__file__).with_suffix(".pid").write_text(str(background.pid))
"""
    (folder / "starts.py").write_text(f"{starts}{PARTS}\ntool = made(function=function)\n")
    assert [spec.name for spec in tool_specs(["starts:tool"], str(folder))] == ["t"]
    process = Path("/proc") / (folder / "starts.pid").read_text() / "stat"
    end = time.monotonic() + 60
    while process.exists() and ") Z " not in process.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_module_may_print_at_its_exit(folder: Path):
    said = "import atexit\natexit.register(print, 'bye')\n"
    (folder / "says.py").write_text(f"{said}{PARTS}\ntool = made(function=function)\n")
    assert [spec.name for spec in tool_specs(["says:tool"], str(folder))] == ["t"]
