"""Checks that an index is the same sample on every worker: a number computed from a few samples, compared on joining.

A directory that is listed in another order, or split by another seed, gives workers of one job other samples, and
nothing fails. Samples are read twice, with the same random streams each time: where that gives different values the
dataset draws by something else, and nothing is compared. Of floating point values the mean and the mean size are
compared, in three digits, for machines may round differently.

Before that they are read with random streams of this worker's own. A dataset that keeps what it drew at random, as a
cache of augmented samples, returns that from then on, and so differs from worker to worker.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from elastic_runtime.state.random_streams import RandomStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES = 3
DRAWN, DRAWS = 16, 4
"""Samples that are read this often: an augmentation of one sample in ten is missed once in a thousand times."""


def sample_checksum(read: Callable[[list[int], int], Any], length: int, seed: int, own: int) -> int:
    """A number above 0 that differs where the samples at a few indices do; 0 where they are not the same each time.

    `read` returns the batch of these indices, drawn with a seed. `own`: a seed that no other worker has.
    """
    indices = [length * part // SAMPLES for part in range(SAMPLES)]
    streams = RandomStreams()
    streams.save()
    try:
        found = []
        for of_read in (own, seed, seed):
            streams.reseed(of_read)
            found.append(zlib.crc32("\n".join(texts_of(read(indices, of_read))).encode()))
    except Exception:  # noqa: BLE001  (a dataset that cannot be read out of turn is not compared)
        return 0
    finally:
        streams.restore()
    return found[1] + 1 if found[1] == found[2] else 0


def draw_at_random(read: Callable[[list[int], int], Any], length: int) -> bool:
    """Return whether samples depend on the seed that they are read with; True if they cannot be read out of turn."""
    count = min(length, DRAWN)
    indices = [length * part // count for part in range(count)]
    try:
        first, *others = [_plain(read(indices, seed)) for seed in range(DRAWS)]
        return any(each != first for each in others)
    except Exception:  # noqa: BLE001  (a dataset that cannot be read out of turn, or samples without a content)
        return True


def _plain(value: Any) -> Any:
    """Return what is equal if the content of a sample is; an object without one never is."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().reshape(-1).contiguous()
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return [(str(key), _plain(part)) for key, part in value.items()]
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def texts_of(value: Any) -> Iterator[str]:
    """Yield the content of a sample as text; figures are rounded."""
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, dict):
        for key in value:
            yield str(key)
            yield from texts_of(value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from texts_of(part)
    elif isinstance(value, str | bytes | int | bool | None):
        yield repr(value)
    else:
        yield type(value).__name__


def _of_tensor(value: torch.Tensor) -> Iterator[str]:
    plain = value.detach().cpu()
    yield f"{plain.dtype} {tuple(plain.shape)}"
    if not plain.numel() or plain.is_complex():
        return
    if plain.is_floating_point():
        plain = plain.double()
        yield f"{plain.mean():.2e} {plain.abs().mean():.2e}"
    else:
        yield str(zlib.crc32(plain.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()))
