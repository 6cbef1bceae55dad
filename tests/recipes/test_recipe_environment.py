"""What a run says of the machine and of its emissions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training.results import command, emissions, hardware


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_hardware_of_a_machine_without_a_gpu():
    name, _, threads = hardware().rpartition(", ")
    assert threads.split()[0] == str(torch.get_num_threads())
    information = Path("/proc/cpuinfo")
    assert name
    assert not information.exists() or "model name" not in information.read_text() or name in information.read_text()


def test_emissions_are_those_of_the_last_run(tmp_path):
    """In the file that CodeCarbon writes, of whose columns these are some."""
    assert emissions(tmp_path) is None
    rows = ["timestamp,project_name,duration,emissions,cpu_power", "a,run,1.5,0.25,5", "b,run,1.5,1.5e-05,5"]
    (tmp_path / "emissions.csv").write_text("\n".join(rows) + "\n")
    assert emissions(tmp_path) == 1.5e-5


def test_the_command_tells_no_secrets():
    argv = ["/home/someone/recipes/glue.py", "--hub-token", "hf_secret", "--hub_tok=hf_secret", "--data_dir",
            "/home/someone/glue data", "--output_dir", "runs/{task}", "--learning_rate", "1e-3"]  # fmt: skip
    assert command(argv, "hf_secret") == (
        "accelerate launch recipes/glue.py --hub-token TOKEN --hub_tok=TOKEN --data_dir 'glue data' --output_dir "
        "'runs/{task}' --learning_rate 1e-3"
    )
