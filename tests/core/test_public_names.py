"""What `import houlsby_peft` gives, and what it leaves for later."""

from __future__ import annotations

import subprocess
import sys

import houlsby_peft


def test_the_hub_and_serving_are_imported_only_when_they_are_asked_for():
    code = """
import sys, houlsby_peft
late = ("hub", "serving", "placement.show", "prefix_cache", "cli")
loaded = lambda: [name for name in sys.modules if name.startswith(tuple(f"houlsby_peft.{part}" for part in late))]
assert not loaded(), loaded()
assert "peft" in sys.modules and "HOULSBY" in sys.modules["peft"].PeftType.__members__
houlsby_peft.load
assert "houlsby_peft.serving.load" in loaded() and "houlsby_peft.hub.push" not in loaded()
houlsby_peft.push_to_hub
assert "houlsby_peft.hub.push" in loaded()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    assert set(houlsby_peft.__all__) <= set(dir(houlsby_peft))
    for name in houlsby_peft.__all__:
        assert getattr(houlsby_peft, name) is not None
        assert getattr(houlsby_peft, name).__doc__, name
