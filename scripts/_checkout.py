"""Lets `python scripts/<command>.py` run in a checkout that is not installed, from any folder: the
checkout's root takes the place of scripts/ among the places of imports, also in processes started here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = str(HERE.parent)
sys.path[:] = [ROOT, *(place for place in sys.path if place not in (ROOT, str(HERE)))]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
