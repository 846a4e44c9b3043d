"""Shared by all tests: GPU tests skip, with the reason, where there is none; one CPU thread."""

from __future__ import annotations

import pytest
import torch

# Tensors here are small: more threads cost more than they bring, and tests may share the machine.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device: torch.cuda.is_available() is False"))
