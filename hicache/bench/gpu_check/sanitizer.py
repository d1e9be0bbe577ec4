"""NVIDIA's memory checker over `copies` and `pages`, where it is there and takes the device."""

from __future__ import annotations

import shutil
import subprocess
import sys

from hicache.bench.gpu_check.check import Check, Skipped

TOOL = "compute-sanitizer"
_REFUSED = "Device not supported"


def run(check: Check) -> None:
    for name, what in (("copies", "random copies"), ("pages", "the page kernels")):
        with check.step(f"memcheck over {what}") as step:
            step.value = _memcheck(check, name)


def _memcheck(check: Check, name: str) -> str:
    """racecheck would have nothing to look at: no kernel of ours uses shared memory."""
    if shutil.which(TOOL) is None:
        raise Skipped(f"{TOOL} is not here")
    if check.is_dry:
        raise Skipped("nothing for it to look at")
    report = check.folder / f"sanitizer-{name}.jsonl"
    report.unlink(missing_ok=True)
    command = [TOOL, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    command += [sys.executable, "-m", "hicache.bench.gpu_check", name, "--small"]
    command += ["--report", str(report), "--folder", str(check.folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    said = ran.stdout + ran.stderr
    (check.folder / f"sanitizer-{name}.log").write_text(said)
    if _REFUSED in said:
        raise Skipped(f"{TOOL} refuses the device: {_REFUSED}")
    ours = [line for line in said.splitlines() if line.startswith("=========")]
    assert ran.returncode == 0, " ".join(ours[-4:]) or said[-300:]
    summary = " ".join(ours[-1:]).strip("= ") or f"status {ran.returncode}"
    rows = report.read_text()
    assert '"status": "FAILED"' not in rows, f"a step failed under it; {summary}"
    num_ok = rows.count('"status": "ok"')
    return f"{summary}; {num_ok} steps were right under it"
