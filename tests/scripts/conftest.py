"""Shared by the tests of scripts/."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine: no GPU, but for what is marked so."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
