"""Launches: by a driver that records what it is asked, and, where there is a GPU, in earnest."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ops import nvrtc


class Params(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("value", ctypes.c_float), ("n", ctypes.c_int))


def test_a_kernel_needs_a_cuda_device() -> None:
    with pytest.raises(nvrtc.CudaError, match="tensors on cpu; they need a CUDA device"):
        nvrtc.kernel("tiny.cu", "tilegpt_fill", {}, torch.device("cpu"))


class FakeDriver:
    """A driver that answers each launch as told, and records what it is asked."""

    def __init__(self, *statuses: str, context: int = 1):
        from cuda.bindings import driver

        for name in (
            "CUresult",
            "CUfunction_attribute",
            "CUlaunchConfig",
            "CUlaunchAttribute",
            "CUlaunchAttributeID",
        ):
            setattr(self, name, getattr(driver, name))
        self.statuses, self.context, self.calls = list(statuses), context, []

    def _ok(self, *values: Any) -> tuple[Any, ...]:
        return (self.CUresult.CUDA_SUCCESS, *values)

    def cuLaunchKernel(self, *arguments: Any) -> tuple[Any]:
        self.calls.append(arguments)
        return (getattr(self.CUresult, f"CUDA_{self.statuses.pop(0)}"),)

    def cuLaunchKernelEx(self, config: Any, *arguments: Any) -> tuple[Any]:
        (attribute,) = config.attrs
        kind = attribute.id.name, attribute.value.programmaticStreamSerializationAllowed
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        self.calls.append((kind, grid, block, config.sharedMemBytes, int(config.hStream), arguments[0]))
        return (getattr(self.CUresult, f"CUDA_{self.statuses.pop(0)}"),)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return self._ok(self.context)

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return self._ok(index)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return self._ok(100 + device)

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        self.context = context
        return self._ok()

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> tuple[Any, ...]:
        self.calls.append((attribute.name, value))
        return self._ok()

    def cuGetErrorString(self, status: Any) -> tuple[Any, ...]:
        return self._ok(b"words")

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self._ok(12040)


@pytest.fixture
def on_fake(monkeypatch: pytest.MonkeyPatch, source: Path) -> Any:
    """on_fake(*statuses): (a kernel on device 1 of a fake driver, the driver)."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Fake 100")
    properties = SimpleNamespace(shared_memory_per_block_optin=100_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)

    def make(*statuses: str, registers: int = 40, **options: int) -> tuple[nvrtc.Kernel, FakeDriver]:
        driver = FakeDriver(*statuses, **options)
        monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
        used = nvrtc.Usage(registers, 0, 1024)
        return nvrtc.Kernel("tilegpt_fill", "tiny.cu sm_90a HEAD_DIM=64", "function", 1, used), driver

    return make


def test_a_launch(on_fake: Any) -> None:
    """The stream is torch's, the one argument goes by reference, and plain shared memory asks for nothing."""
    kernel, driver = on_fake("SUCCESS", "SUCCESS", "SUCCESS")
    kernel.launch(5, 128, Params(n=3))
    kernel.launch((5, 6, 7), 128, Params(n=3), shared_bytes=47 * 1024)
    assert [call[:10] for call in driver.calls] == [
        ("function", 5, 1, 1, 128, 1, 1, 0, 77, driver.calls[0][9]),
        ("function", 5, 6, 7, 128, 1, 1, 47 * 1024, 77, driver.calls[1][9]),
    ]
    driver.calls.clear()
    kernel.launch(5, 128, Params(), shared_bytes=90_000)
    assert driver.calls[0] == ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 90_000)


def test_an_early_launch(on_fake: Any) -> None:
    """Nothing of a launch is kept for the next, and a refused one is told."""
    kernel, driver = on_fake("SUCCESS", "SUCCESS", "ERROR_INVALID_VALUE")
    kernel.launch((5, 6, 7), 128, Params(n=3), shared_bytes=47 * 1024, early=True)
    kernel.launch(9, 64, Params(n=3), early=True)
    kind = ("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", 1)
    assert driver.calls == [
        (kind, (5, 6, 7), (128, 1, 1), 47 * 1024, 77, "function"),
        (kind, (9, 1, 1), (64, 1, 1), 0, 77, "function"),
    ]
    with pytest.raises(nvrtc.CudaError, match="grid"):
        kernel.launch(5, 128, Params(), early=True)


def test_threads_launch_early_by_configurations_of_their_own(on_fake: Any) -> None:
    on_fake()
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(nvrtc._early_config).result()
    assert nvrtc._early_config() is nvrtc._early_config() is not theirs


def test_more_shared_memory_is_asked_for_once(on_fake: Any) -> None:
    kernel, driver = on_fake(*["SUCCESS"] * 4)
    for shared_bytes in (60_000, 60_000, 50_000, 70_000):
        kernel.launch(5, 128, Params(), shared_bytes)
    asked = [call[1] for call in driver.calls if len(call) == 2]
    assert asked == [60_000, 70_000]


def test_a_thread_without_a_context_gets_one(on_fake: Any) -> None:
    kernel, driver = on_fake("ERROR_INVALID_CONTEXT", "SUCCESS", context=0)
    kernel.launch(5, 128, Params())
    assert driver.context == 101 and len(driver.calls) == 2


@pytest.mark.parametrize(
    ("status", "facts", "said"),
    [
        ("LAUNCH_OUT_OF_RESOURCES", {"threads": 512}, "512 threads of 168 registers exceed 65536"),
        ("INVALID_VALUE", {"grid": (1, 70_000, 1)}, "a grid is 1 to 2147483647 by 65535 by 65535 blocks"),
        ("ILLEGAL_ADDRESS", {}, r"CUDA_ERROR_ILLEGAL_ADDRESS \(words\); grid \(4, 1, 1\), 128 threads"),
        ("INVALID_VALUE", {"shared_bytes": 99_000}, r"needs 100,024 .* Fake 100 has 100,000: choose"),
    ],
)  # fmt: skip
def test_a_refused_launch_says_what_to_do(
    on_fake: Any, status: str, facts: dict[str, Any], said: str
) -> None:
    kernel, _ = on_fake(f"ERROR_{status}", registers=168)
    with pytest.raises(nvrtc.CudaError, match=said) as error:
        kernel.launch(**({"grid": 4, "threads": 128, "params": Params()} | facts))
    assert "tilegpt_fill (tiny.cu sm_90a HEAD_DIM=64)" in str(error.value)


def test_an_old_driver_is_told(on_fake: Any) -> None:
    _, driver = on_fake()
    for status in ("INVALID_IMAGE", "NO_BINARY_FOR_GPU", "UNSUPPORTED_PTX_VERSION"):
        with pytest.raises(nvrtc.CudaError, match=r"tiny\.cu sm_80: .*The driver runs CUDA 12\.4 .*update"):
            nvrtc._called("tiny.cu sm_80", (driver.CUresult[f"CUDA_ERROR_{status}"], None))


@pytest.fixture
def fill(source: Path) -> Any:
    """fill(x, value, factor): x = value * factor + 0.5, by the kernel."""

    def launch(x: torch.Tensor, value: float, factor: int = 2) -> None:
        kernel = nvrtc.kernel(str(source), "tilegpt_fill", {"FACTOR": factor}, x.device)
        kernel.launch(-(-x.numel() // 128), 128, Params(x.data_ptr(), value, x.numel()))

    return launch


@pytest.mark.gpu
def test_launches(fill: Any, source: Path) -> None:
    x = torch.zeros(1000, device="cuda")
    fill(x, 3.0)
    assert torch.equal(x, torch.full_like(x, 6.5))
    fill(x, 3.0, factor=3)
    assert torch.equal(x, torch.full_like(x, 9.5))
    kernel = nvrtc.kernel(str(source), "tilegpt_fill", {"FACTOR": 2}, x.device)
    assert kernel is nvrtc.kernel(str(source), "tilegpt_fill", {"FACTOR": 2}, torch.device("cuda"))
    with pytest.raises(nvrtc.CudaError, match="has no kernel tilegpt_other; it has"):
        nvrtc.kernel(str(source), "tilegpt_other", {"FACTOR": 2}, x.device)
    with pytest.raises(nvrtc.CudaError, match="a grid is 1 to"):
        kernel.launch((1, 70_000, 1), 128, Params())


@pytest.mark.gpu
def test_more_shared_memory_than_plain_launches_have(source: Path) -> None:
    x = torch.randn(20_000, device="cuda")  # 80 kB
    kernel = nvrtc.kernel(str(source), "tilegpt_reverse", {"FACTOR": 1}, x.device)
    expected = x.flip(0) * 2
    kernel.launch(1, 128, Params(x.data_ptr(), 2.0, x.numel()), shared_bytes=4 * x.numel())
    assert torch.equal(x, expected)
    with pytest.raises(nvrtc.CudaError, match=r"needs 1,000,512 bytes of shared memory"):
        kernel.launch(1, 128, Params(x.data_ptr(), 2.0, 5), shared_bytes=1_000_000)


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "compiled during the capture"])
def test_is_captured(fill: Any, warm: bool) -> None:
    x = torch.zeros(1000, device="cuda")
    if warm:
        fill(x, 1.0, factor=5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill(x, 2.0, factor=5)
        x.mul_(2)
    x.zero_()
    graph.replay()
    assert torch.equal(x, torch.full_like(x, 21.0))


@pytest.mark.gpu
def test_runs_on_the_current_stream(fill: Any) -> None:
    """Behind half a second of sleep on the stream: a launch on another would be overwritten."""
    x, stream = torch.zeros(1000, device="cuda"), torch.cuda.Stream()
    fill(x, 1.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        x.fill_(7.0)
        fill(x, 3.0)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(x, torch.full_like(x, 6.5))


@pytest.mark.gpu
def test_launches_from_other_threads(fill: Any) -> None:
    """A new thread has no context yet; autograd runs backward in one of its own."""
    x = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    thread = threading.Thread(target=fill, args=(x, 4.0))
    thread.start()
    thread.join()
    assert torch.equal(x, torch.full_like(x, 8.5))

    class Fill(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(grad)
            fill(out, 5.0, factor=7)
            return out

    x.requires_grad_()
    Fill.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 35.5))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_on_a_device_that_is_not_current(fill: Any) -> None:
    x = torch.zeros(1000, device="cuda:1")
    fill(x, 3.0)
    assert torch.cuda.current_device() == 0 and torch.equal(x, torch.full_like(x, 6.5))
