"""Linear layers, with their weights laid out for the device at hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS_HINT = 16  # oneDNN chooses a layout by it; those for 4 to 64 rows are the same


class Linear:
    """y = x W^T + b of W [out, in] and b [out] or None.

    On a CPU weights in bfloat16 are laid out once as oneDNN's kernels read them, where it would
    otherwise do so in every pass: 40 % of the time of a pass of few rows (measured).  The rows come
    out bit for bit as without.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, lay_out: bool = True
    ) -> None:
        """`lay_out`: False where torch.compile is to have the weights as they are."""
        self.bias = bias
        self._laid_out = lay_out and weight.device.type == "cpu" and _can_lay_out(weight.dtype)
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT) if self._laid_out else weight
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [R, in] -> [R, out]."""
        if not self._laid_out:
            return F.linear(rows, self.weight, self.bias)
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.weight, self.bias, "none", [], ""
        )
        return found


def _can_lay_out(dtype: torch.dtype) -> bool:
    return (
        dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
