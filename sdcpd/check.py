"""`--check-config` with roles: what a start would find wrong, without starting anything."""

from __future__ import annotations

from pathlib import Path

from sdcpd import settings
from sdcpd.api_server import https_identity
from sdcpd.config import Config
from sdcpd.config_places import place_problems
from sdcpd.engine.api import ModelError
from sdcpd.engine.tokenizer import TextModel
from sdcpd.parts import Instance, Parts, StartError
from sdcpd.transport.identity_files import IdentityError
from tiers.api import TierError

MODEL_FILES = ("config.json", "tokenizer.json")


def problems_of(config: Config, instances: list[Instance]) -> list[str]:
    """One sentence for each thing that would keep an instance from starting."""
    parts = Parts(config)
    found = list(place_problems(config, instances)) if instances else []
    for instance in instances:
        try:
            identity = parts.identity(instance)
            parts.check_base_uri(instance, identity)
        except (IdentityError, StartError) as e:
            found.append(f"{instance.label}: {str(e).removeprefix(f'{instance.label}: ')}")
        if instance.role == "router":
            found += _api_problems(config, instance)
        problems = model_problems(config, instance.role) + _log_problems(config, instance)
        found += [f"{instance.label}: {text}" for text in problems]
    return found


def _api_problems(config: Config, instance: Instance) -> list[str]:
    from sdcpd.roles.api_access import Keys, KeysError

    found = []
    try:
        https_identity(config, instance)
    except IdentityError as e:
        found.append(f"[api.tls]: {e}")
    try:
        if config.api is not None and config.api.keys_file is not None:
            Keys(config.api.keys_file)
    except KeysError as e:
        found.append(f"[api] keys_file: {e}")
    return found


def model_problems(config: Config, role: str) -> list[str]:
    """What is wrong with the model directory of a role."""
    if role == "router":
        own = config.router.model if config.router else None
        verifier = config.verifier.model.path if config.verifier else None
        path = own or verifier
        try:
            if path is not None:
                TextModel.load(path)
        except ModelError as e:
            return [str(e)]
        return []
    section = config.verifier if role == "verifier" else config.drafter
    path = section.model.path if section else None
    if path is None:
        return []
    return _directory_problems(path)


def _log_problems(config: Config, instance: Instance) -> list[str]:
    if instance.role != "router" or config.mlc.commit_log != "etcd":
        return []
    try:
        settings.etcd(config, instance.fill)
    except TierError as e:
        return [str(e)]
    return []


def _directory_problems(path: Path) -> list[str]:
    if not path.is_dir():
        return [f"model directory {path} does not exist; check the path"]
    missing = [name for name in MODEL_FILES if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    return [f"model directory {path}: {name} is missing" for name in missing]
