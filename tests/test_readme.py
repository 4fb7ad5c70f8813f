"""The README's example runs as it is printed there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_on_eight_devices(tmp_path):
    code = re.search(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[1]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses = [float(line) for line in ran.stdout.split()]
    assert losses[-1] < losses[0]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert len(plan["mesh"]["device_order"]) == 8
    assert plan["provenance"]["baselines"].keys() == {"data_parallel", "fsdp", "tensor_parallel"}
