"""Our kernels in Triton, whose binaries are cached in the folder that Triton takes by itself.

torch.compile, where none is set, sets a folder of its own as it compiles a kernel, but not where all of its
kernels are in its cache: the next process looked for ours where they were not, and compiled them again (4 to
15 s)."""

import os

_home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
_folder = os.path.join(_home, ".triton", "cache")
if os.access(next(filter(os.path.exists, (_folder, os.path.dirname(_folder))), _home), os.W_OK):
    os.environ.setdefault("TRITON_CACHE_DIR", _folder)
