import multiprocessing
import sys

import pytest

from model.training import imports


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="Inductor compiles in threads there")
def test_inductors_processes_are_left_to_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """At exit nothing waits for them, and they do end when the pipe to them is closed."""
    from torch._inductor import async_compile
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    pool = SubprocPool(1)
    monkeypatch.setattr(async_compile, "_pool_set", {pool})
    imports._leave_compilers()
    pool.shutdown()
    assert pool.process.poll() is None
    pool.write_pipe.close()
    assert pool.process.wait(60) is not None
    assert not multiprocessing.active_children()
