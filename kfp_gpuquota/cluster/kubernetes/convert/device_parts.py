"""Computes which part of a GPU a DRA driver's device is: a partition, or consumable capacity of a shared device. Pure.

| the device                                           | counts as                                                    |
|------------------------------------------------------|--------------------------------------------------------------|
| consumes counters of its pool's counter sets         | its part of the counter that `countsBy` names, else `memory` |
| allows multiple allocations, and has such a capacity | what the request consumes of it, by its `requestPolicy`      |
| any other, also one without that counter or capacity | one GPU                                                      |

What a request may get is known by its DeviceClass and its own selectors, as far as they are understood. It counts as
the largest device of these until it is allocated, then as what it has; as a GPU for each if no device is published.

A node has one GPU of `gpuPart/DRIVER` for each counter set and shared device, and as much of each counter of all of
them together (`gpuPart/DRIVER/COUNTER`). So a plan never sends more to a node than its GPUs have, but what is left may
be on several GPUs: kube-scheduler then binds no pod there, and its reservation moves (unpinned.py).

Rejected: to plan each GPU of a node. kube-scheduler alone chooses the device of a claim, and what a plan assumes about
one GPU would be wrong after the first claim that it places otherwise.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING, Final, NamedTuple

from kfp_gpuquota.api.quantity import parse_quantity
from kfp_gpuquota.api.resources import GPU_PART_PREFIX, WHOLE_GPU
from kfp_gpuquota.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from kfp_gpuquota.api.resources import Resources
    from kfp_gpuquota.cluster.kubernetes.convert.claimed_devices import Demand, Selected
    from kfp_gpuquota.cluster.kubernetes.objects.device_types import (
        DeviceCapacity,
        ResourceSliceSpec,
        SlicedDevice,
    )

MEMORY: Final = "memory"
SMALLEST_PART: Final = WHOLE_GPU // 1000
"""The least that a part of a GPU counts as: a driver may allow requests for one byte."""

Pool = tuple[str, str]  # driver and name
Attribute = tuple[str, str, str, str | bool | int]  # driver, domain, name and value


class Size(NamedTuple):
    """What a device takes of its GPUs: millionths of each counter, and if it is shared, its capacity by name."""

    counters: Resources = ()
    capacity: tuple[tuple[str, DeviceCapacity], ...] = ()

    @property
    def is_whole(self) -> bool:
        """Return whether the device is one that is neither divided nor shared."""
        return not self.counters and not self.capacity


WHOLE: Final = Size()


class PublishedParts:
    """The sizes of all devices of drivers of which some device is a part of a GPU."""

    def __init__(self) -> None:
        self._devices: dict[Pool, dict[str, Size]] = {}
        self._attributes: dict[Pool, tuple[tuple[Attribute, Size], ...]] = {}
        self._of_driver: dict[str, Counter[Size]] = {}
        self._of_attribute: dict[Attribute, Counter[Size]] = {}

    def put_pool(self, pool: Pool, slices: Collection[ResourceSliceSpec]) -> tuple[bool, bool]:
        """Replace the slices of a pool; return whether its devices have changed, and which sizes there are at all.

        A device whose counter set is not published, or not any more, is not either.
        """
        sets = counter_sets(slices)
        listed = (device for one in slices for device in one.devices)
        devices = [one for one in listed if {of.counter_set for of in one.consumes_counters} <= sets.keys()]
        sizes = {device.name: size_of(device, sets) for device in devices}
        before = self._devices.get(pool, {})
        if sizes == before:
            changed = False
        else:
            changed = self.divides(pool[0]) or any(not size.is_whole for size in sizes.values())
        kinds = set(self._of_driver.get(pool[0], ()))
        _count(self._of_driver, ((pool[0], size) for size in before.values()), -1)
        _count(self._of_driver, ((pool[0], size) for size in sizes.values()), 1)
        _count(self._of_attribute, self._attributes.pop(pool, ()), -1)
        rows = tuple((key, sizes[device.name]) for device in devices for key in _attributes_of(pool[0], device))
        _count(self._of_attribute, rows, 1)
        self._devices[pool], self._attributes[pool] = sizes, rows
        if not sizes:
            del self._devices[pool], self._attributes[pool]
        return changed, kinds != set(self._of_driver.get(pool[0], ()))

    def has(self, device: tuple[str, str, str]) -> bool:
        """Return whether a device (driver, pool, name) is published."""
        driver, pool, name = device
        return name in self._devices.get((driver, pool), {})

    def divides(self, driver: str) -> bool:
        """Return whether any device of the driver is a part of a GPU, or shared."""
        return any(not size.is_whole for size in self._of_driver.get(driver, ()))

    def part_of(self, demand: Demand, conditions: Selected, counts_by: str) -> Resources | None:
        """Return what each device of the demand takes of the GPUs of its driver; None if that divides none.

        `conditions` are those of the DeviceClass, and `counts_by` the counter or capacity of its row.
        """
        driver = demand.device[0] if demand.device is not None else conditions.driver
        if not self.divides(driver):
            return None
        sizes = self._sizes(demand, driver, conditions)
        largest: dict[str, int] = {}
        for size in sizes or (WHOLE,):
            for name, amount in amounts_of(driver, size, counts_by, dict(demand.capacity)).items():
                largest[name] = max(largest.get(name, 0), amount)
        return tuple(sorted(largest.items()))

    def _sizes(self, demand: Demand, driver: str, conditions: Selected) -> set[Size]:
        """Return the sizes of the device that the demand has, else of all that it may get."""
        if demand.device is not None:
            driver, pool, name = demand.device
            found = self._devices.get((driver, pool), {}).get(name)
            if found is not None:
                return {found}
        sizes = set(self._of_driver.get(driver, ()))
        for domain, name, value in (*conditions.attributes, *demand.selected.attributes):
            sizes &= set(self._of_attribute.get((driver, domain, name, value), ()))
        return sizes


def _count(counts: dict[str, Counter[Size]] | dict[Attribute, Counter[Size]], rows: Iterable, by: int) -> None:  # type: ignore[type-arg]
    for key, size in rows:
        counter = counts.setdefault(key, Counter())
        counter[size] += by
        if not counter[size]:
            del counter[size]
            if not counter:
                del counts[key]


def _attributes_of(driver: str, device: SlicedDevice) -> Iterator[Attribute]:
    for key, given in device.attributes.items():
        domain, _, name = key.rpartition("/")
        for value in given.values():
            if isinstance(value, str | bool | int):
                yield driver, domain or driver, name, value


def counter_sets(slices: Collection[ResourceSliceSpec]) -> dict[str, dict[str, Fraction]]:
    """Return the counters of each counter set of a pool."""
    return {
        one.name: {name: _number(counter.value) for name, counter in one.counters.items()}
        for published in slices
        for one in published.shared_counters
    }


def size_of(device: SlicedDevice, sets: Mapping[str, Mapping[str, Fraction]]) -> Size:
    """Return the size of a device of a pool with these counter sets."""
    counters: Counter[str] = Counter()
    for consumed in device.consumes_counters:
        totals = sets.get(consumed.counter_set, {})
        for name, counter in consumed.counters.items():
            if total := totals.get(name):
                counters[name] += _part(_number(counter.value), total)
    shared = device.capacity if device.allow_multiple_allocations else {}
    capacity = {key.rpartition("/")[2]: one for key, one in shared.items()}
    return Size(tuple(sorted(counters.items())), tuple(sorted(capacity.items(), key=lambda row: row[0])))


def amounts_of(driver: str, size: Size, counts_by: str, requested: Mapping[str, str]) -> dict[str, int]:
    """Return what a device takes of the GPUs of its driver, of which `requested` is consumed by its capacity's name."""
    taken = dict(size.counters)
    consumed = {name: _consumed(one, requested.get(name, "")) for name, one in size.capacity}
    counted = WHOLE_GPU
    for found in (taken, consumed):
        counted = counted * (found.get(counts_by) or found.get(MEMORY) or WHOLE_GPU) // WHOLE_GPU
    name = f"{GPU_PART_PREFIX}{driver}"
    others = {f"{name}/{kind}": amount for kind, amount in (taken or consumed).items() if amount}
    return {name: max(SMALLEST_PART, counted), **others}


def gpus_of_pool(slices: Collection[ResourceSliceSpec], devices: Collection[SlicedDevice]) -> dict[str, int]:
    """Return what the GPUs have of which these `devices` of a pool are parts, as in `amounts_of`."""
    found: Counter[str] = Counter()
    driver = next((one.driver for one in slices), "")
    name, sets = f"{GPU_PART_PREFIX}{driver}", counter_sets(slices)
    used = {one.counter_set for device in devices for one in device.consumes_counters}
    alone = [device for device in devices if not device.consumes_counters]
    found[name] = WHOLE_GPU * (len(used & sets.keys()) + len(alone))
    kinds = [kind for one in used & sets.keys() for kind in sets[one]]
    kinds += [key.rpartition("/")[2] for one in alone if one.allow_multiple_allocations for key in one.capacity]
    found.update({f"{name}/{kind}": WHOLE_GPU * count for kind, count in Counter(kinds).items()})
    return {key: amount for key, amount in found.items() if amount}


def _consumed(capacity: DeviceCapacity, requested: str) -> int:
    """Return the millionths of a device's capacity that kube-scheduler lets a request consume: rounded up, or all.

    `requested` is "" for a request without this capacity.
    """
    total, policy = _number(capacity.value), capacity.request_policy
    if not requested:
        return _part(_number(policy.default), total) if policy is not None and policy.default else WHOLE_GPU
    amount = _number(requested)
    valid = policy.valid_range if policy is not None else None
    if valid is not None and valid.min:
        smallest, step = _number(valid.min), _number(valid.step)
        amount = max(amount, smallest)
        if step > 0:
            amount = smallest + -(-(amount - smallest) // step) * step
    elif policy is not None and policy.valid_values:
        amount = min((one for one in map(_number, policy.valid_values) if one >= amount), default=amount)
    return min(WHOLE_GPU, _part(amount, total))


def _part(amount: Fraction, total: Fraction) -> int:
    """Return an amount in millionths of the total, rounded down: the parts of a GPU add up to no more than it has."""
    return int(max(Fraction(0), amount) * WHOLE_GPU // total) if total > 0 else 0


def _number(quantity: object) -> Fraction:
    try:
        return parse_quantity("capacity", str(quantity or "0"))
    except InvalidFieldError:
        return Fraction(0)
