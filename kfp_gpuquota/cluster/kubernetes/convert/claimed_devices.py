"""Reads which devices a claim requests, and which devices a DeviceClass selects (resource.k8s.io). Pure.

A DeviceClass selects devices by CEL. Only conjunctions of equalities are evaluated, which the drivers' own classes are:

    device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].type == "gpu"

Any other condition is left to kube-scheduler: the plan then assumes that all devices that the other conditions select
are of the class. That never affects the quota, which counts requests. Rejected: a CEL interpreter, as a dependency of
the controller for a part of the plan that kube-scheduler checks again.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kfp_gpuquota.cluster.kubernetes.convert.resource_requests import MAX_DEVICES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from kfp_gpuquota.cluster.kubernetes.objects.device_types import (
        AllocatedDevice,
        DeviceClass,
        DeviceRequest,
        DeviceSelector,
        ExactRequest,
        ResourceClaimSpec,
        SlicedDevice,
    )

EXACT_COUNT: Final = "ExactCount"
LONGEST_EXPRESSION: Final = 10 << 10  # the API server's own limit
_TEXT: Final = r"""(?:"(?P<{0}>[^"'\\]*)"|'(?P<{0}_>[^"'\\]*)')"""
_VALUE: Final = rf"(?:{_TEXT.format('text')}|(?P<flag>true|false)|(?P<number>[0-9]{{1,18}}))"
_DRIVER: Final = re.compile(rf"device\.driver\s*==\s*{_TEXT.format('text')}", re.ASCII)
_ATTRIBUTE: Final = re.compile(
    rf"device\.attributes\[{_TEXT.format('domain')}\]\.(?P<name>\w+)\s*==\s*{_VALUE}", re.ASCII
)
_NOT_CONJUNCTIVE: Final = ("||", "?", '"""', "'''")
# Texts are read first. One with a prefix (r"\\", in which a backslash is one) or without its end is not understood.
_LEXEME: Final = re.compile(
    r"""(?P<text>(?<!\w)(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'))|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<and>&&)"""
    r"""|(?P<other>["']|//)"""
)
_HARD: Final = frozenset({"NoSchedule", "NoExecute"})


class Selected(NamedTuple):
    """What the understood conditions of a class or a request require of a device; `approximate`: there are others.

    `attributes` are (domain, name, value). Without a `driver` and with other conditions no device is selected.
    """

    driver: str = ""
    attributes: tuple[tuple[str, str, str | bool | int], ...] = ()
    approximate: bool = False


class Demand(NamedTuple):
    """Devices of one class that a request asks for, or one `device` (driver, pool, name) that it has.

    `capacity` is what each consumes, by name.
    """

    device_class: str
    number: int = 1
    selected: Selected = Selected()
    capacity: tuple[tuple[str, str], ...] = ()
    device: tuple[str, str, str] | None = None


class ClaimedDevices(NamedTuple):
    """What a claim requests of DeviceClasses, and why those of some classes cannot be counted."""

    demands: tuple[Demand, ...] = ()
    uncountable: tuple[tuple[str, str], ...] = ()

    @property
    def amounts(self) -> tuple[tuple[str, int], ...]:
        """Return the number of devices by DeviceClass."""
        found: dict[str, int] = {}
        for one in self.demands:
            found[one.device_class] = min(MAX_DEVICES, found.get(one.device_class, 0) + one.number)
        return tuple(sorted(found.items()))


def claimed_devices(spec: ResourceClaimSpec, allocated: Collection[AllocatedDevice] = ()) -> ClaimedDevices:
    """Return what the claim requests, or once it is allocated, what it has."""
    demands: dict[str, Demand] = {}
    uncountable: dict[str, str] = {}
    for request in spec.devices.requests:
        if (exact := request.exactly) is not None:
            name, count = exact.device_class_name, min(MAX_DEVICES, max(0, exact.count))
            capacity = by_name(exact.capacity.requests) if exact.capacity is not None else ()
            demands[request.name] = Demand(name, count, _selected(exact.selectors), capacity)
            if why := _why_uncountable(exact):
                uncountable[name] = f"its request {request.name} {why}"
        else:
            uncountable.update(_alternatives(request))
    found = tuple(demands.values())
    if allocated:
        classes = classes_of(spec)
        found = tuple(
            demands.get(one.request, Demand(classes.get(one.request, "")))._replace(
                number=1, capacity=by_name(one.consumed_capacity), device=(one.driver, one.pool, one.device)
            )
            for one in allocated
            if not one.admin_access
        )
    return ClaimedDevices(found, tuple(sorted(uncountable.items())))


def by_name(amounts: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return amounts by the name of a capacity, without its domain."""
    return tuple(sorted((name.rpartition("/")[2], str(amount)) for name, amount in amounts.items()))


def classes_of(spec: ResourceClaimSpec) -> dict[str, str]:
    """Return the DeviceClass of each request, by the name that an allocated device has for it."""
    return dict(_classes(spec))


def _classes(spec: ResourceClaimSpec) -> Iterator[tuple[str, str]]:
    for request in spec.devices.requests:
        if request.exactly is not None:
            yield request.name, request.exactly.device_class_name
        for one in request.first_available:
            yield f"{request.name}/{one.name}", one.device_class_name


def _why_uncountable(exact: ExactRequest) -> str:
    if exact.admin_access:
        return "has adminAccess, which is for pods outside of the quota"
    if exact.allocation_mode not in {"", EXACT_COUNT}:
        return f"has allocationMode {exact.allocation_mode}; write how many devices it needs (count)"
    return ""


def _alternatives(request: DeviceRequest) -> Iterator[tuple[str, str]]:
    why = f"its request {request.name} has alternatives (firstAvailable); write exactly one of them"
    return ((one.device_class_name, why) for one in request.first_available)


def selected_by(device_class: DeviceClass) -> Selected:
    """Return the conditions of the class."""
    return _selected(device_class.spec.selectors)


def _selected(selectors: Collection[DeviceSelector]) -> Selected:
    driver, attributes, approximate = "", [], False
    for selector in selectors:
        for condition in _conditions(selector.cel.expression if selector.cel is not None else ""):
            if (found := _DRIVER.fullmatch(condition)) is not None and driver in {"", _text(found, "text")}:
                driver = _text(found, "text")
            elif (found := _ATTRIBUTE.fullmatch(condition)) is not None:
                attributes.append((_text(found, "domain"), found["name"], _value(found)))
            else:
                approximate = True
    return Selected(driver, tuple(attributes), approximate)


def _conditions(expression: str) -> list[str]:
    """Return the parts of a conjunction; of any other expression the whole of it, which is no condition above.

    A tenant writes the selectors of its requests: what is in a text, in parentheses or in a comment is no part.
    """
    if len(expression) > LONGEST_EXPRESSION or any(sign in expression for sign in _NOT_CONJUNCTIVE):
        return [""]
    parts, start, depth = list[str](), 0, 0
    for found in _LEXEME.finditer(expression):
        if found["open"]:
            depth += 1
        elif found["close"]:
            depth -= 1
        elif found["other"]:
            return [""]
        elif found["and"] and not depth:
            parts.append(expression[start : found.start()])
            start = found.end()
    return [part.strip() for part in (*parts, expression[start:])]


def _text(found: re.Match[str], group: str) -> str:
    return found[group] if found[group] is not None else found[f"{group}_"]


def _value(found: re.Match[str]) -> str | bool | int:
    if found["flag"] is not None:
        return found["flag"] == "true"
    return int(found["number"]) if found["number"] is not None else _text(found, "text")


def is_tainted(device: SlicedDevice) -> bool:
    """Return whether no further claim gets the device."""
    return any(taint.effect in _HARD for taint in device.taints)


def selects(conditions: Selected, driver: str, device: SlicedDevice) -> bool:
    """Return whether a driver's device is of the class, as far as its conditions are understood."""
    if (conditions.approximate and not conditions.driver) or conditions.driver not in {"", driver}:
        return False
    return all(_attribute(device, driver, domain, name) == value for domain, name, value in conditions.attributes)


def _attribute(device: SlicedDevice, driver: str, domain: str, name: str) -> Any:
    """Return the value of an attribute; one without a domain is in that of its driver."""
    for key, given in device.attributes.items():
        of, _, plain = key.rpartition("/")
        if plain == name and (of or driver) == domain:
            return next(iter(given.values()), None)
    return None
