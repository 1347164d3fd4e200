"""What an operator says of a model, and how another process is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """`[verifier.model]` or `[drafter.model]` of the configuration."""

    path: Path
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    """CPU threads of a pass; 0 leaves torch's choice."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile, and CUDA graphs on a GPU; "auto": on a GPU."""
    tensor_parallel: int = 1
    """Over how many processes, each with a GPU of its own where there are any."""
    kv_octets_max: int = 2 << 30
    model: bytes | None = None
    """What the digest of the weights must be (D-C9); None for any."""
    tokenizer: bytes | None = None

    def plain(self) -> dict[str, Any]:
        """As `of` takes it back; strings, numbers and octets."""
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def of(cls, members: dict[str, Any]) -> ModelSettings:
        """The settings that `plain` was made of."""
        return cls(**{**members, "path": Path(members["path"])})
