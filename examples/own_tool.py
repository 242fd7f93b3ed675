"""A tool of your own: read-only SQL over a small database, beside Python.

rstar stage 1 --rollout.instruct --tools.use python own_tool:sql --own-folder examples --run-dir runs/tool

A tool is a name, a JSON schema and an async function. It runs in a separate process, with your rights: the policy
writes the query, so the database is opened read-only.
"""

import sqlite3
from contextlib import closing

from rstar_ray.tools.tool import Tool, ToolFailed

COUNTRIES = [("France", 68.4), ("Kenya", 55.1), ("Peru", 34.0)]


def open_database() -> sqlite3.Connection:
    """Replace this by your own: `sqlite3.connect("file:mine.db?mode=ro", uri=True)`."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE countries (name TEXT, millions REAL)")
    database.executemany("INSERT INTO countries VALUES (?, ?)", COUNTRIES)
    database.execute("PRAGMA query_only = ON")
    return database


async def query(statement: str) -> str:
    """Rows as lines of tab-separated values. A statement that fails is the policy's failure, and it reads why."""
    with closing(open_database()) as database:
        try:
            rows = database.execute(statement).fetchmany(50)
        except sqlite3.Error as wrong:
            raise ToolFailed(f"SQL error: {wrong}") from wrong
    return "\n".join("\t".join(map(str, row)) for row in rows) or "no rows"


sql = Tool(
    name="sql",
    description="Runs one SQL statement on the table countries(name, millions) and returns at most 50 rows.",
    parameters={"type": "object", "properties": {"statement": {"type": "string"}}, "required": ["statement"]},
    function=query,
)
