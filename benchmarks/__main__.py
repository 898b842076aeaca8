"""All benchmarks, on the CPU and, where there is one, on the GPU: `python -m benchmarks`."""

import subprocess
import sys

import torch

for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
    for module in ("steps", "whole_run"):
        command = [sys.executable, "-m", f"benchmarks.{module}", "--device", device]
        print(f"\n$ python -m benchmarks.{module} --device {device}", flush=True)
        subprocess.run(command, check=True)
