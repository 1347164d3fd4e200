"""Rotary position embeddings (RoPE, arXiv 2104.09864) and how they are stretched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.x: low frequencies are divided, high ones are not, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def apply(self, inverse: torch.Tensor) -> torch.Tensor:
        """Inverse wavelengths, stretched."""
        wavelength = 2 * math.pi / inverse
        low = self.original_context / self.low_freq_factor
        high = self.original_context / self.high_freq_factor
        smooth = (self.original_context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - smooth) * inverse / self.factor + smooth * inverse
        return torch.where(
            wavelength > low,
            inverse / self.factor,
            torch.where(wavelength < high, inverse, blended),
        )


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions are divided."""

    factor: float

    def apply(self, inverse: torch.Tensor) -> torch.Tensor:
        """Inverse wavelengths, stretched."""
        return inverse / self.factor


@dataclass(frozen=True, slots=True)
class Rope:
    """Base and scaling of a layer's position embedding."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | None = None

    def table(
        self, head_dim: int, positions: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [positions, head_dim], in binary32."""
        half = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse = 1.0 / (self.theta**half)
        if self.scaling is not None:
            inverse = self.scaling.apply(inverse)
        angles = torch.arange(positions).float()[:, None] * inverse[None, :]
        angles = torch.cat((angles, angles), dim=-1).to(device)
        return angles.cos(), angles.sin()


def ropes_of(raw: Mapping[str, Any]) -> tuple[Rope, Rope]:
    """Of layers that see the whole context, and of those with a window, by `config.json`.

    Raises KeyError for what is missing.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(raw.get("rope_theta") or 10_000.0)
    if "full_attention" in rope or "sliding_attention" in rope:
        return tuple(
            Rope(float(part.get("rope_theta") or theta), _scaling(part))
            for part in (rope.get("full_attention", {}), rope.get("sliding_attention", {}))
        )  # type: ignore[return-value]
    whole = Rope(float(rope.get("rope_theta") or theta), _scaling(rope))
    local = raw.get("rope_local_base_freq")
    return whole, whole if local is None else Rope(float(local))


def unsupported_scaling(raw: Mapping[str, Any]) -> str | None:
    """The first kind of scaling that a `config.json` names and that is not known here."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return next((kind for part in parts if (kind := _kind(part)) not in KINDS), None)


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _scaling(rope: Mapping[str, Any]) -> Llama3Scaling | LinearScaling | None:
    kind = _kind(rope)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(float(rope["factor"]))
    return Llama3Scaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )
