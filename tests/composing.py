"""Hydra without its waste: what conf/ gives for the same choices of files is read and merged once a process.

A run of tests/running.py composes two to six times, most of it to the same effect. Values and errors are
worked out anew each time.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

from conf.compose import CONF


def hasten() -> None:
    """Once per process; of config folders other than conf/, which tests write, nothing is kept."""
    from hydra._internal import config_loader_impl as loader
    from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
    from hydra._internal.defaults_list import DefaultsList, Overrides

    read = ConfigRepository.load_config
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
        """Hydra's own files too, of which a list has 18: to read was a third of the time to compose."""
        if not of_conf(self):
            return read(self, config_path)
        key = config_path, *((source.provider, source.path) for source in self.get_sources())
        if key not in files:
            files[key] = pickle.dumps(read(self, config_path))
        return pickle.loads(files[key])

    def repository(self: Any, delegate: Any) -> None:
        """With the same sources, which nobody changes: to copy them was an eighth of it."""
        self.delegate, self.cache = copy.copy(delegate), {}

    ConfigRepository.load_config, CachingConfigRepository.__init__ = read_once, repository
    loader.create_defaults_list = list_once
    loader.ConfigLoaderImpl._compose_config_from_defaults_list = merge_once
