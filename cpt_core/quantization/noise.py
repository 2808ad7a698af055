"""Noise for stochastic rounding: a pool that is drawn once, and a hash for compiled code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class LongNoise:
    """Noise for a tensor that is larger than the pool, which is read round and round, part by part."""

    pool: Tensor  # two times the same ``size`` numbers
    offset: int
    size: int

    def part(self, start: int, count: int) -> Tensor:
        """Return the numbers of the elements from ``start`` on, (count,)."""
        first = (self.offset + start) % self.size
        pool = self.pool if first + count <= 2 * self.size else self.pool.repeat(-(-count // self.size))
        return pool.narrow(0, first, count)


class NoisePool:
    """Uniform noise for stochastic rounding: drawn once, then read at a pseudo-random offset in every call.

    Drawing fresh noise would take most of the time of the gradient quantiser. The state is two integers, the seed and
    the number of calls, so a resumed run continues with the same noise. Copies share the pool itself.
    """

    SIZE = 1 << 22

    def __init__(self, seed: int = 0) -> None:
        """Start a stream for ``seed``, any integer."""
        self.seed, self.calls = int(seed), 0

    def draw(self, like: Tensor) -> Tensor:
        """Return noise in [-0.5, 0.5), float32, with the shape and the device of ``like``."""
        noise = self.draw_long(like).part(0, like.numel())
        if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
            return noise.as_strided(like.shape, like.stride())  # the same order in memory: adding it stays fast
        return noise.view(like.shape)

    def draw_long(self, like: Tensor) -> LongNoise:
        """Return the same noise to be read in parts, without a copy of it."""
        offset = _mix(self.seed, self.calls) % self.SIZE
        self.calls += 1
        return LongNoise(_noise(self.seed, like.device), offset, self.SIZE)

    def state_dict(self) -> dict[str, int]:
        """Return seed and number of calls."""
        return {"seed": self.seed, "calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue a stored stream."""
        self.seed, self.calls = int(state["seed"]), int(state["calls"])


@lru_cache(maxsize=4)
def _noise(seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_mix(seed, -1) >> 1)
    pool = torch.rand(NoisePool.SIZE, generator=generator, dtype=torch.float32, device="cpu").sub_(0.5)
    return torch.cat([pool, pool]).to(device)  # twice, so that every offset has SIZE values after it


def _mix(seed: int, index: int) -> int:
    """Return 64 well-mixed bits of a pair of integers (the splitmix64 finaliser)."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def hash_noise(like: Tensor, key: Tensor) -> Tensor:
    """Return noise in [-0.5, 0.5) as a function of (key, element index); what compiled code uses.

    Args:
        like: gives shape and device.
        key: 0-d int64, different in every call.
    """
    index = torch.arange(like.numel(), device=like.device, dtype=torch.int64)
    z = index ^ (key * 0x9E3779B1)  # the key is mixed in, not added: no shifted copies of one sequence
    z = (z ^ (z >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    z = (z ^ (z >> 15)) * 0x846CA68B & 0xFFFFFFFF
    z = (z ^ (z >> 16)) & 0xFFFFFF
    return (z.float() * 2.0**-24 - 0.5).view(like.shape)
