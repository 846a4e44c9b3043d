"""Every command in the blocks of README and docs/ runs as written, made small by what is appended to it."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from attention import registry
from attention.base import UnsupportedAttention
from attention.naive import NaiveAttention
from scripts.measure.report.sweep_report import beside
from scripts.measure.rows import by_gpu
from tests.running import ROOT, Result, train_here, write_book

pytestmark = pytest.mark.sampled(4)

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "attention" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
COMMANDS = sorted(
    {
        re.split(r"\s#", line)[0].strip()
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
        for line in (block.splitlines() if kind in ("", "bash") else ())
        if re.match(r"(\w+=\S+ )?(python scripts/|python train|make )", line)
    }
)
SMALL_RUN = (
    "seq_len=16", "model.n_layer=2", "model.n_embd=32", "model.n_head=4", "data.batch_size=2",
    "data.max_val_tokens=64", "trainer.max_steps=2", "trainer.val_check_interval=2",
    "trainer.accelerator=cpu", "callbacks.samples.tokens=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the reader has: a book, notes, prompts, a run to go on from, two to compare; and of the standard
    library four packages, as reading all takes longer than the runs."""
    folder, stdlib = tmp_path_factory.mktemp("reader"), Path(sysconfig.get_path("stdlib"))
    for package in ("asyncio", "email", "json", "xml"):
        shutil.copytree(stdlib / package, folder / "lib" / package)
    write_book(folder)
    (folder / "notes").mkdir()
    for i in range(12):
        shutil.copy(folder / "book.txt", folder / "notes" / f"{i}.md")
    (folder / "prompts.txt").write_text("import\ndef main\n")
    shutil.copy(folder / "book.txt", folder / "other.txt")
    talk = [{"role": role, "content": "tiles"} for role in ("user", "assistant")]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 40)
    there = SimpleNamespace(get_path=lambda _: folder / "lib")
    with mock.patch("data.corpora.sysconfig", there):
        for name in ("first", "second", "my-run", "gpt2-auto"):
            assert train_here(folder, "data=stdlib", *SMALL_RUN, f"name={name}", tiny=False).code == 0
        yield folder


@pytest.fixture(scope="module")
def pretrained(folder: Path) -> Path:
    """A folder of transformers, in the place of all that there are on the Hub."""
    pytest.importorskip("transformers")
    from tests.pretrained import make_folder

    make_folder(folder / "models" / "my-llama", "llama")
    template = "{% for m in messages %}{{ m.role + ':' + m.content + ' ' }}{% endfor %}"
    asked = "{% if add_generation_prompt %}assistant:{% endif %}"
    (folder / "models" / "my-llama" / "chat_template.jinja").write_text(template + asked)
    return folder / "models" / "my-llama"


def run_script(folder: Path, name: str, arguments: list[str]) -> Result:
    """A script's `main`, as its command line calls it."""
    module, code, out, err = import_module(f"scripts.{name}"), 0, io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", [f"scripts/{name}.py", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = module.main(*([arguments] if inspect.signature(module.main).parameters else []))
        except SystemExit as stop:
            code = stop.code
    return Result(code or 0, out.getvalue(), err.getvalue())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.long] * ("experiment=quickstart" in command))  # 10 s
        for command in COMMANDS
        if "train.py" in command and "bench" not in command
    ],
)
def test_train(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    arguments = shlex.split(command)[2:]
    if arguments == ["--help"]:
        result = train_here(folder, "--help", tiny=False)
        named = re.search(r"^attention=auto [^=]*", result.out, flags=re.MULTILINE)[0].split()
        assert {"auto", "naive", "triton", "flash4", "sdpa"} <= set(named)
        return
    small = [item for item in SMALL_RUN if "ckpt" not in command or item.startswith("callbacks")]
    if "ckpt" in command:
        small.append("trainer.max_steps=3")
    elif "init_from" in command:  # which sets the model
        small = [item for item in small if not item.startswith("model.")]
        if "gpt2-auto" not in command:
            there = str(request.getfixturevalue("pretrained"))
            monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: there)
    elif "experiment=shakespeare_char" in command:
        small = ["data=text", "data.path=book.txt", "data.tokenizer.kind=char", *small]  # no Hub here
    # the run that the README names anew is in the way of nobody; what is appended wins
    result = train_here(folder, *arguments, *small, tiny=False)
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    assert "validation loss" in result.out


@pytest.mark.parametrize("command", [c for c in COMMANDS if "scripts/" in c])
def test_scripts(
    folder: Path, command: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    *settings, _, script = shlex.split(command.partition(".py")[0] + ".py")
    name, arguments = Path(script).stem, shlex.split(command.partition(".py")[2])
    if settings:  # of the environment: for a process of its own
        if importlib.util.find_spec("triton") is None:
            pytest.skip("the command is for triton's interpreter")
        environment = os.environ | dict(each.split("=") for each in settings)
        subprocess.run([sys.executable, script, *arguments], cwd=ROOT, env=environment, check=True)
        return
    if name in ("bench_train", "bench_ladder", "first_call", "roofline"):
        import torch

        if torch.cuda.is_available():
            pytest.skip("minutes of a GPU")
        assert "needs a CUDA GPU" in run_script(folder, name, arguments).code
        return
    small = {
        "generate": "max_new_tokens=6 ckpt=first",
        "plot": "",
        "bench_generate": "--model tiny --batch 2 --prompt 4 --new 4 --seq-len 16 --out x.jsonl",
        "bench_serve": "--model tiny --requests 2 --prefix 8 --suffix 1 2 --new 1 3 --repeat 1 --out s.jsonl",
        "bench_attention": "--attention naive tiled --heads 2 --batch 1 --head-dim 16 --seq-len 32 --causal "
        "--budget 0.002 --out y.jsonl",
        "which_kernel": "seq_len=32 heads=2",
        "compare": "seq_len=32 heads=2",
        "parity": "--seeds 1 2 --steps 4 --cpu --out z.jsonl model.n_layer=1",
        "estimate": "",
        "report": "auto --check",  # all of it: tests/scripts/test_report.py
        "export": "ckpt=first",
        "evaluate": "ckpt=first stride=8",
        "harness": "ckpt=first",
    }[name].split()
    small += ["speculate=first"] * ("speculate=small" in arguments)
    theirs = "ckpt=Qwen/" in command or "ckpt=models/" in command
    if theirs or "chat=true" in command:
        there = str(request.getfixturevalue("pretrained"))
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: there)
        small = {"compare": ["attention=tiled"], "evaluate": ["context=64"]}.get(name, small)
        small = [word for word in small if word != "ckpt=first"] + [f"ckpt={there}"] * (not theirs)
    result = run_script(folder, name, [*arguments, *small])
    if name == "harness":  # its tasks are on the Hub
        assert importlib.util.find_spec("lm_eval") or "pip install -e '.[eval]'" in result.err
        return
    assert result.code == 0, result.err
    assert result.out.strip()


def test_make_targets() -> None:
    """CI runs `make test` and `make train` themselves; here, that the README names targets that are there."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)", TEXT, flags=re.MULTILINE))
    assert named and named <= targets


def test_the_first_screen_says_what_was_measured() -> None:
    """Its sentences' figures, from the rows behind the picture."""
    rows = [
        json.loads(line) for line in (ROOT / "results/seqlen_scaling/h200.jsonl").read_text().splitlines()
    ]
    points = {
        (row["point"]["implementation"], row["point"]["seq_len"], row["point"]["micro_batch"]): row
        for row in rows
    }
    of = {point: row["result"] for point, row in points.items()}
    screen = " ".join(README.split("## Two commands")[0].split())

    def speed(name: str, length: int) -> str:
        ours = points[name, length, 65536 // length]
        return f"{ours['result']['tokens_per_s'] / beside(ours, rows)['result']['tokens_per_s']:.2f}x"

    def peak(name: str) -> str:
        return f"{of[name, 65536, 1]['peak_mib'] / 1024:.1f}"

    assert f"Naive attention trains at {speed('naive', 1024)} nanoGPT's speed at T = 1k" in screen
    assert "needs smaller micro-batches from 4k on, and runs out of memory at 16k" in screen
    naive = {point[1:]: result["status"] for point, result in of.items() if point[0] == "naive"}
    assert (naive[2048, 32], naive[4096, 16], naive[4096, 8], naive[8192, 2]) == ("ok", "oom", "ok", "ok")
    assert naive[16384, 1] == "oom"
    assert f"flash-attn 4 it is {speed('flash4', 1024)} at 1k and {speed('flash4', 32768)} at 32k" in screen
    cudnn, triton = (f"{speed(n, 1024)} at 1k and {speed(n, 65536)} at 64k" for n in ("sdpa_cudnn", "triton"))
    assert f"cuDNN's attention it is {cudnn}" in screen
    assert f"our Triton kernels it is {triton}" in screen
    assert f"cuDNN or Triton peaks at {peak('triton')} GiB, nanoGPT at {peak('nanoGPT')} GiB" in screen
    assert peak("triton") == peak("sdpa_cudnn")
    steps = {
        row["point"]["implementation"]: f"{row['result']['peak_mib'] / 1024:.1f} GiB with"
        for row in by_gpu(ROOT / "results/step_memory")["h200"]
        if row["point"]["seq_len"] == 8192
    }
    whole = [steps[name] for name in ("naive", "sdpa_cudnn")]
    assert f"at T = 8k takes {whole[0]} naive attention, {whole[1]} cuDNN" in screen
    exact = [name for name in registry.implementations() if registry.declaration(name).operand_dtype is None]
    assert len(exact) > 20 and "over 20 implementations" in screen  # another one needs no edit here


def test_the_attention_to_copy_is_one() -> None:
    """The file and the YAML of docs/adding-an-attention.md, as they stand there."""
    text = (ROOT / "docs" / "adding-an-attention.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(python|yaml)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    names: dict = {"__name__": "attention.mine"}
    exec(compile(blocks["python"], "attention/mine.py", "exec"), names)
    mine = names["MyAttention"]()
    q, k, v = torch.randn(3, 2, 4, 20, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mine(q, k, v), NaiveAttention()(q, k, v))
    with pytest.raises(UnsupportedAttention, match="window"):
        mine(q, k, v, window=(4, 0))
    assert f"name: {mine.name} #" in blocks["yaml"]  # test_configs.py holds each key to a comment


def test_experiments_are_all_named() -> None:
    named = re.search(r"^\| `experiment` \|(.*)\|$", TEXT, flags=re.MULTILINE)[1]
    there = {path.stem for path in (ROOT / "conf/experiment").glob("*.yaml")}
    assert set(re.findall(r"`(\w+)`", named)) == there


def test_links_lead_somewhere() -> None:
    for path in (*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "ops" / "README.md"):
        prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (path.parent / link).exists(), f"{path.relative_to(ROOT)}: {link}"


def test_everything_was_found() -> None:
    assert len(COMMANDS) >= 25 and len(README.split()) <= 1300
