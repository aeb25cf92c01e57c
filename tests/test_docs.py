"""The code in docs/ runs as it stands, with NumPy."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize("name", ["decoding.md"])
def test_blocks_run_in_order(name):
    text = (DOCS / name).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count("```python") > 3
    names = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
