"""What a command of the user finds in its jail."""

import sys
from pathlib import Path

import pytest

from sandbox.command import CommandEnd, read_command, running

pytestmark = pytest.mark.isolated


async def run(folder: Path, code: str) -> CommandEnd:
    folder.chmod(0o755)
    (folder / "agent.py").write_text(code)
    command = read_command(f"{sys.executable} agent.py", str(folder), memory_mb=512, confined=True)
    async with running(command, {}) as started:
        return await started.end()


async def test_the_names_of_its_own_machine_are_its_only_address(tmp_path: Path):
    end = await run(
        tmp_path,
        """
import socket
for name in ("localhost", socket.gethostname()):
    print({address[0] for *_, address in socket.getaddrinfo(name, 80)})
server = socket.create_server(("localhost", 0))
socket.create_connection(("localhost", server.getsockname()[1])).close()
try: print(socket.getaddrinfo("example.com", 80))
except socket.gaierror: print("no other name")
""",
    )
    assert (end.exit_status, end.stdout) == (0, "{'127.0.0.1'}\n{'127.0.0.1'}\nno other name\n"), end


async def test_its_standard_streams_have_names_in_dev(tmp_path: Path):
    end = await run(
        tmp_path,
        """
import os, subprocess
if os.path.isdir("/proc/self"):
    subprocess.run("echo shell > /dev/stdout; echo error > /dev/stderr; cat /dev/stdin", shell=True, check=True)
else:
    print("shell"); os.write(2, b"error\\n")
""",
    )
    assert (end.exit_status, end.stdout, end.stderr) == (0, "shell\n", "error\n")
