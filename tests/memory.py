"""How much memory a piece of code takes, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Linux only: what POSIX's getrusage says of a new process includes what its parent had.
measured = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

PEAK = """
import re
from pathlib import Path
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def growth(imports: str, code: str) -> int:
    """Bytes by which `code` raises the peak of a process in which `imports` has run."""
    script = f"{PEAK}\n{imports}\nbefore = peak()\n{code}\nprint(peak() - before)"
    return int(subprocess.check_output([sys.executable, "-c", script]))
