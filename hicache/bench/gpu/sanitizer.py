"""NVIDIA's memory checker over the check `copies`, where it is there and takes the device."""

from __future__ import annotations

import shutil
import subprocess
import sys

from hicache.bench.gpu.check import Check, Skipped

TOOL = "compute-sanitizer"
_REFUSED = "Device not supported"


def run(check: Check) -> None:
    with check.step("memcheck over random copies") as step:
        if shutil.which(TOOL) is None:
            raise Skipped(f"{TOOL} is not here")
        if check.is_dry:
            raise Skipped("nothing for it to look at")
        report = check.folder / "sanitizer-copies.jsonl"
        report.unlink(missing_ok=True)
        command = [TOOL, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
        command += [sys.executable, "-m", "hicache.bench.gpu", "copies", "--small"]
        command += ["--report", str(report), "--folder", str(check.folder)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        said = ran.stdout + ran.stderr
        (check.folder / "sanitizer-output.log").write_text(said)
        if _REFUSED in said:
            raise Skipped(f"{TOOL} refuses the device: {_REFUSED}")
        ours = [line for line in said.splitlines() if line.startswith("=========")]
        step.value = " ".join(ours[-1:]).strip("= ") or f"status {ran.returncode}"
        assert ran.returncode == 0, " ".join(ours[-4:]) or said[-300:]
        rows = report.read_text().count('"status": "ok"')
        step.value += f"; {rows} steps of copies were right under it"
