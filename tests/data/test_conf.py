"""conf/data: every yaml composes and instantiates as the command line would."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from data.datamodule import TokenDataModule

CONF = Path(__file__).parents[2] / "conf"
CORPORA = sorted(path.stem for path in (CONF / "data").glob("*.yaml"))


def datamodule(*overrides: str) -> TokenDataModule:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=["+seq_len=32", "+seed=7", *overrides])
    return instantiate(config.data)


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_instantiates(name):
    module = datamodule(f"+data={name}", *(["data.path=x.txt"] if name in ("text", "chat") else []))
    assert isinstance(module, TokenDataModule)
    assert module.corpus.name == name
    assert (module.seq_len, module.seed, module.batch_size, module.eval_batch_size) == (32, 7, 16, 16)
    assert type(module.tokenizer_spec) in (dict, str)
    if hasattr(module.corpus, "train"):
        assert type(module.corpus.val) is list


def test_all_eight_are_there():
    expected = {
        "chat",
        "fineweb_edu",
        "openwebtext",
        "shakespeare",
        "stdlib",
        "synthetic",
        "text",
        "tinystories",
    }
    assert set(CORPORA) == expected


def test_overrides_reach_their_place(folder, tmp_path):
    module = datamodule(
        "+data=text",
        f"data.path={folder}",
        "data.tokenizer.kind=char",
        "data.batch_size=3",
        f"data.data_dir={tmp_path}",
    )
    module.prepare_data()
    module.setup()
    assert module.tokenizer.name == "char" and module.eval_batch_size == 3
    assert next(iter(module.train_dataloader()))["input_ids"].shape == (3, 32)
    assert datamodule("+data=synthetic", "data.corpus.vocab_size=99").corpus.vocab_size == 99


def test_every_key_has_a_comment():
    # these say themselves what they are, or data_defaults.yaml does
    plain = {"defaults", "_target_", "corpus", "name", "dataset", "config", "tokenizer", "kind", "vocab_size"}
    for path in (CONF / "data_defaults.yaml", *(CONF / "data").glob("*.yaml")):
        for line in path.read_text().splitlines():
            key = line.strip().partition(":")[0]
            assert "#" in line or key in plain, f"{path.name}: {line}"
