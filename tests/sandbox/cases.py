"""Runs a file of cases at one level, as any user: `python -m tests.sandbox.cases LEVEL FILE`."""

import asyncio
import sys
from pathlib import Path

from sandbox.case_check import check_case, read_cases
from tests import derived


async def main(level: str, file: str) -> None:
    """Print a line for each case that was not contained, and their number."""
    cases, contained = read_cases(Path(file)), 0
    async with derived.pool(only=level) as pool:
        for case in cases:
            result, wrong = await check_case(pool, case)
            contained += not wrong
            if wrong:
                print(f"{case.name}: {result.outcome}: {'; '.join(wrong)}", flush=True)
    print(f"contained {contained} of {len(cases)}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
