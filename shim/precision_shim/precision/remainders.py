"""Parameter remainders: an fp32 master weight stored as a bf16 parameter and 16 more bits.

With ``store_param_remainders`` TransformerEngine's FusedAdam (2.1 and later) stores only the low
half of each fp32 master, as int16, beside the bf16 parameter. This module splits and rebuilds them
bit for bit, as its kernel does (``common/multi_tensor/adam.cu``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 numbers into bf16 parameters and the 16 low bits that bf16 leaves out.

    The parameter is the master rounded to nearest, **ties away from zero**. The method
    ``.bfloat16()`` rounds ties to even: its result differs from the parameter if the low half is
    exactly ``0x8000``. The remainder is the low half of the master's bits, read as a signed number.
    A negative remainder means that the parameter was rounded away from zero.

    Args:
        master: fp32, any shape.

    Returns:
        ``(param, remainder)``: bf16 and int16, of the same shape.

    Raises:
        TypeError: ``master`` is not fp32.
    """
    if master.dtype != torch.float32:
        raise TypeError(f"split_master wants torch.float32, got {master.dtype}")
    bits = master.contiguous().view(torch.int32)
    low = _wrap_int16(bits & 0xFFFF)
    high = (bits >> 16) + (low < 0)
    return _wrap_int16(high).view(torch.bfloat16), low


def join_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Rebuild the fp32 numbers that ``split_master`` split, bit for bit.

    The result is exact for every bit pattern, including denormals, infinities and NaN.

    Args:
        param: bf16, any shape.
        remainder: int16, of the shape of ``param``.

    Raises:
        TypeError: an argument has a wrong dtype.
    """
    if param.dtype != torch.bfloat16 or remainder.dtype != torch.int16:
        raise TypeError(
            "join_master wants torch.bfloat16 and torch.int16, "
            f"got {param.dtype} and {remainder.dtype}"
        )
    low = remainder.to(torch.int32)
    high = param.contiguous().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def _wrap_int16(value: torch.Tensor) -> torch.Tensor:
    # A plain cast of an out-of-range integer differs between platforms; this cast always wraps.
    return (((value + 0x8000) & 0xFFFF) - 0x8000).to(torch.int16)


def looks_like_remainders(master: torch.Tensor, param: Callable[[], torch.Tensor]) -> bool:
    """Whether fp32 "masters" are really int16 remainders (low bits) that were converted to floats.

    Megatron stores remainders under the master's name, and torch's distributed checkpoint casts
    remainders on load: -12345 silently becomes -12345.0. An fp32 master is close to its parameter,
    and hardly ever has only whole numbers.

    Args:
        master: the loaded master weights, floating point, any shape.
        param: function that returns the live parameter (as many elements as ``master``, any
            floating dtype); called only if ``master`` alone does not decide.
    """
    if master.numel() == 0 or not master.dtype.is_floating_point:
        return False
    value = master.detach().float().flatten()
    if not bool(torch.equal(value, value.round())) or float(value.abs().max()) > 32768.0:
        return False
    # fp32 masters of norms, biases and new LoRA layers may also be whole: all 0 or all 1.
    here = param().detach().float().flatten().to(value.device)
    return not bool(torch.allclose(value, here, rtol=2.0**-7, atol=2.0**-24))


def rounds_exactly(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a narrower dtype represents every element of an fp32 tensor exactly."""
    return bool(torch.equal(value.to(dtype).to(value.dtype).nan_to_num(), value.nan_to_num()))
