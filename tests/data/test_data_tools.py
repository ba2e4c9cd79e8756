"""The data tools as processes that are killed or interrupted at random times: complete output, or none."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREPROCESS = ["tools/preprocess_data.py", "--tokenizer", "bytes", "--workers", "3", "--output-prefix"]
TRAIN = ["tools/train_tokenizer.py", "--vocab-size", "4000", "--sample-bytes", "4000000", "--output"]


def workers(pid: int) -> list[int]:
    """Processes that tokenize for `pid`."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def session(pid: int) -> list[str]:
    """Living processes of the session that `pid` began."""
    listed = subprocess.run(["ps", "-o", "stat=,args=", "-s", str(pid)], capture_output=True, text=True, check=False)
    return [line for line in listed.stdout.splitlines() if not line.startswith("Z")]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("command", "event"), [(PREPROCESS, "kill"), (PREPROCESS, "INT"), (PREPROCESS, "TERM"), (TRAIN, "INT")]
)
def test_ended_at_random_times(tmp_path: Path, command: list[str], event: str) -> None:
    """12 times each: a worker gets SIGKILL, or the tool SIGINT (with its workers, as from a terminal) or SIGTERM."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    lines = [json.dumps({"text": module.read_text(encoding="utf-8", errors="replace")}) for module in modules] * 4
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))

    def start(folder: Path) -> subprocess.Popen[str]:
        folder.mkdir()
        arguments = [sys.executable, *command, str(folder / "x"), "--input", str(source)]
        pipe = subprocess.PIPE
        return subprocess.Popen(arguments, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    begin = time.monotonic()
    process = start(tmp_path / "whole")
    assert process.wait() == 0
    whole, expected = time.monotonic() - begin, files(tmp_path / "whole")
    draw = random.Random(0)
    ends: Counter[str] = Counter()
    slowest = 0.0
    for trial in range(12):
        folder = tmp_path / str(trial)
        process = start(folder)
        begin = time.monotonic()
        while command is PREPROCESS and not workers(process.pid) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(max(0.0, draw.uniform(0.2, 0.8) * whole - (time.monotonic() - begin)))
        begin = time.monotonic()
        if event == "kill":
            for pid in draw.sample(found, 1) if (found := workers(process.pid)) else []:
                os.kill(pid, signal.SIGKILL)
        elif event == "INT" and process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        elif process.poll() is None:
            process.terminate()
        _, said = process.communicate(timeout=60)
        slowest = max(slowest, time.monotonic() - begin)
        time.sleep(0.5)
        assert session(process.pid) == []
        left = files(folder)
        if left:  # it was done before, or while, the event came
            assert left == expected
        else:
            assert process.returncode in ((2,) if event == "kill" else (130, -signal.SIGINT, -signal.SIGTERM))
            assert event != "kill" or "was killed by SIGKILL at " in said
        assert "Traceback" not in said
        ends[f"rc {process.returncode}, {'complete' if left else 'nothing left'}"] += 1
    print(f"{Path(command[0]).stem} {event}: {dict(ends)}, at most {slowest:.1f} s; a whole run takes {whole:.1f} s")
    assert sum(count for end, count in ends.items() if "nothing" in end) >= 4
