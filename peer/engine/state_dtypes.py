"""The dtypes of a layout as torch has them; only inside of engines' processes."""

from __future__ import annotations

from typing import Final

import torch

STATE_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
}
