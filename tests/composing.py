"""Hydra without its waste: what conf/ gives for the same choices of files is read and merged once a process.

A run of tests/running.py composes two to six times, most of it to the same effect. Values and errors are
worked out anew each time.
"""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

from conf.compose import CONF


def hasten() -> None:
    """Once per process; of config folders other than conf/, which tests write, nothing is kept."""
    from hydra._internal import config_loader_impl as loader
    from hydra.core.plugins import Plugins

    Plugins.instance()  # which loads the next module once more, for itself
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.defaults_list import DefaultsList, Overrides

    read = FileConfigSource.load_config
    listed, merged = loader.create_defaults_list, loader.ConfigLoaderImpl._compose_config_from_defaults_list
    lists: dict[Any, DefaultsList] = {}
    files: dict[Any, bytes] = {}
    configs: dict[Any, bytes] = {}  # pickled: to load one takes a sixth of the time of copy.deepcopy

    def of_conf(repo: Any) -> bool:
        return {source.path for source in repo.get_sources()} <= {"hydra.conf", "", "conf", str(CONF)}

    def list_once(repo: Any, config_name: str | None, overrides_list: list[Any], **how: Any) -> DefaultsList:
        values = Overrides(repo=repo, overrides_list=overrides_list).config_overrides
        choices = [x for x in overrides_list if x not in values and not x.is_sweep_override()]
        key = config_name, *sorted(how.items()), *(choice.input_line for choice in choices)
        if not of_conf(repo):
            return listed(repo, config_name, overrides_list, **how)
        if key not in lists:
            lists[key] = listed(repo, config_name, choices, **how)
        return dataclasses.replace(lists[key], config_overrides=values)

    def merge_once(self: Any, defaults: list[Any], repo: Any) -> Any:
        if not of_conf(repo):
            return merged(self, defaults, repo)
        key = tuple(map(repr, defaults))
        if key not in configs:
            configs[key] = pickle.dumps(merged(self, defaults, repo))
        return pickle.loads(configs[key])

    def read_once(self: Any, config_path: str) -> Any:
        if Path(self.path).resolve() != CONF:
            return read(self, config_path)
        key = self.provider, config_path
        if key not in files:
            files[key] = pickle.dumps(read(self, config_path))
        return pickle.loads(files[key])

    FileConfigSource.load_config = read_once
    loader.create_defaults_list = list_once
    loader.ConfigLoaderImpl._compose_config_from_defaults_list = merge_once
