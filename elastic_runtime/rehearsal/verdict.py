"""From the records of a rehearsal to what would go wrong on a cluster. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_runtime.rehearsal.loop_variables import variable_of
from elastic_runtime.rehearsal.timetable import FIRST, JOINED, LEADER_LOST, SECOND

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_runtime.rehearsal.records import Fingerprints

    Row = dict[str, Any]

REPEATED_TOLERANCE = 1e-4
"""Of the norm of all gradients: what operations that are not deterministic may change."""
SIZE_TOLERANCES = {"full": 1e-4, "device": 2e-3, "coarse": 0.02}
"""The same, where another number of workers computes in another order: in float32 or better on a CPU, on a device that
may round float32 products as TF32, and where something is computed in 16 bits or fewer.
"""
STATE_TOLERANCE = 1e-3
"""Of a tensor's own norm: two workers that apply the same gradients."""
ROUNDING = 1e-5
"""Of a buffer's own norm: sums over samples in another order."""
_SHOWN = 4
_HALF = (0.4, 0.6)
_OF_A_JOINER = (
    "a worker that joins enters the loop in the middle of an epoch, and may become rank 0 at any step: make what the "
    "loop needs before it, or in a function that @job.on_leader calls"
)


@dataclass(frozen=True)
class Finding:
    """`fails`: it would go wrong; otherwise it is worth knowing."""

    what: str
    why: str
    remedy: str
    fails: bool = True


def findings_of(rows: Sequence[Row]) -> list[Finding]:
    """All findings, errors first."""
    rules = (
        _errors,
        _untrained,
        _repeated_steps,
        _changed_sizes,
        _filled_buffers,
        _buffers_filled_first,
        _states,
        _objects,
        _variables,
        _gathered,
        _checkpoint,
    )
    return [finding for rule in rules for finding in rule(rows)]


def _errors(rows: Sequence[Row]) -> Iterator[Finding]:
    for row in _of(rows, "error"):
        why = f"{row['message']} ({row['where']})" if row.get("where") else row["message"]
        remedy = "mend the script" if row["worker"] == FIRST else _OF_A_JOINER
        remedy = "see the message" if row.get("ours") else remedy
        yield Finding(f"{_stage(rows, row['worker'])} ended with {row['kind']}", why, remedy)


def _stage(rows: Sequence[Row], worker: str) -> str:
    """Which worker it was, and what it had come to."""
    steps = [row["step"] for row in rows if row["worker"] == worker and row["what"] in {"state", "gradients"}]
    if worker == FIRST:
        return f"the worker that began alone, in step {max(steps)}," if steps else "the script, before its first step,"
    if not steps:
        return "a worker that joins"
    became = ", which had become rank 0 after the loss of the first one," if max(steps) >= LEADER_LOST else ""
    return f"the worker that joined in step {JOINED}{became} in step {max(steps)}"


def _untrained(rows: Sequence[Row]) -> Iterator[Finding]:
    if all(row["what"] in {"end", "sharded"} for row in rows):
        yield Finding(
            "the script ended without a step of the job",
            "elastic_runtime.init() alone shares nothing: on a cluster each worker would do all the work by itself, "
            "and job.is_leader would be False on all of them, so that none would save",
            "write: model, optimizer, loader = job.prepare(model, optimizer, loader), iterate over job.epochs(N), and "
            "call job.backward(loss)",
        )


# Gradients


def _repeated_steps(rows: Sequence[Row]) -> Iterator[Finding]:
    for before, after in _attempts(rows):
        if before["workers"] != after["workers"]:
            continue
        names = _differing(before, after, REPEATED_TOLERANCE)
        if names:
            yield Finding(
                f"step {before['step']}, repeated after the loss of a worker, has other gradients than before",
                f"{_listed(names)}: {_off(before, after):.2g} of the norm of all gradients"
                + _hint(before["attributes"], after["attributes"]),
                "something changes with each iteration and is not restored: register tensors that a module changes as "
                "buffers, draw from torch's, numpy's or random's global generators, let a dataset's item depend on its "
                "index, and change parameters by hand only where job.applied",
            )
            return


def _changed_sizes(rows: Sequence[Row]) -> Iterator[Finding]:
    for before, after in _attempts(rows):
        if before["workers"] == after["workers"]:
            continue
        if _differing(before, after, limit_of(before)):
            yield _size_finding(before, after)
            return


def limit_of(row: Row) -> float:
    """Return the part of the norm of all gradients up to which a difference counts as rounding."""
    return SIZE_TOLERANCES[row.get("precision", "coarse")]


def largest_difference(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Return (the largest difference of gradients between sizes, its limit); None where none were compared."""
    pairs = [(a, b) for a, b in _attempts(rows) if a["workers"] != b["workers"] and not a["exact"]]
    found = [(_off(a, b), limit_of(a)) for a, b in pairs if not (a["random"] or a["normalised"])]
    return max(found, default=None)


def _size_finding(before: Row, after: Row) -> Finding:
    small, large = sorted((before, after), key=lambda row: int(row["workers"]))
    ratio = _norm(large["fingerprints"]) / _norm(small["fingerprints"]) if _norm(small["fingerprints"]) else math.inf
    what = f"the gradients of step {before['step']} depend on the number of workers"
    why = f"with 2 workers they differ from those with 1 by {_off(small, large):.2g} of their norm"
    if before["exact"]:
        return Finding(
            f"{what}, with reduction='exact'",
            why + _hint(small["attributes"], large["attributes"]),
            "leave out what depends on job.rank, time or files, and random numbers of other generators than the global "
            "ones of torch, numpy and random",
        )
    if _HALF[0] < ratio < _HALF[1]:
        return Finding(
            what,
            f"{why}: those with 2 are {ratio:.2f} times as large, as those of a sum over the samples are",
            'a sum over the samples, also one divided by a constant, needs job.backward(loss, reduction="sum"), or '
            "becomes "
            "a mean; a sum divided by a number that is counted in the micro-batch (tokens, boxes, weights of classes) "
            "is a mean over these, and needs job.backward(loss, weight=number)",
        )
    if before["random"] or before["normalised"]:
        cause = "normalisation layers see each worker's own samples" if before["normalised"] else ""
        cause = " and ".join(filter(None, [cause, "random numbers are drawn" if before["random"] else ""]))
        return Finding(what, f"{why}; {cause}", "reduction='exact' gives the same at every size", fails=False)
    return Finding(
        what,
        why + _hint(small["attributes"], large["attributes"]),
        "a mean over anything but samples (tokens, pixels that count, boxes, weights of classes) needs "
        "job.backward(loss, weight=number); a loss over pairs of a batch, or a term that is no mean over samples (a "
        "balance of experts), needs reduction='exact' or job.gather_batch; a tensor that a module changes has to be a "
        "buffer; state of the loop has to be in an object that job.track carries",
    )


def _filled_buffers(rows: Sequence[Row]) -> Iterator[Finding]:
    """With "exact" buffers are those of one part of the step at every size."""
    for before, after in _attempts(rows):
        if before["workers"] == after["workers"] or before["exact"]:
            continue
        names = _other_changes(before.get("buffers", {}), after.get("buffers", {}), limit_of(before))
        if names:
            what = f"buffers that step {before['step']} fills depend on the number of workers: {_listed(names)}"
            yield Finding(what, *_FOLLOW_RANK_0)
            return


def _buffers_filled_first(rows: Sequence[Row]) -> Iterator[Finding]:
    """Statistics of a first epoch, of which no step is computed by two workers."""
    found = [row for row in _of(rows, "gradients") if row["worker"] == FIRST and not row["exact"]]
    filled = {name for row in found if row["step"] < JOINED for name in _changed_buffers(row)}
    still = {name for row in found if row["step"] >= JOINED for name in _changed_buffers(row)}
    names = sorted(filled - still)
    if names and any(row["step"] >= JOINED for row in found):
        what = f"buffers are filled before step {JOINED} only, where sizes are compared: {_listed(names)}"
        yield Finding(what, *_FOLLOW_RANK_0, fails=False)


def _changed_buffers(row: Row) -> list[str]:
    return [name for name, (norm, *_) in row.get("buffers", {}).items() if norm]


_FOLLOW_RANK_0 = (
    "buffers follow rank 0, and what other workers write to them is lost: a memory bank, counts of classes or a "
    "running mean are then of rank 0's samples only",
    "fill them from rows of the whole batch, which job.gather_batch(rows) gives, or, after optimizer.step() and under "
    "`if job.applied:`, from sums by job.all_reduce; a figure that nothing depends on may be an attribute",
)


def _other_changes(one: Fingerprints, other: Fingerprints, limit: float) -> list[str]:
    """Names of buffers that two attempts have changed by other amounts, beyond rounding of the values themselves."""
    found = []
    for name in sorted(set(one) & set(other)):
        *change, norm = one[name]
        *again, _ = other[name]
        largest = max((abs(value) for value in (*change, *again) if math.isfinite(value)), default=0.0)
        if _distance(change, again) > max(STATE_TOLERANCE, limit) * largest + ROUNDING * norm:
            found.append(name)
    return found


def _attempts(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Each step that a worker computed twice, with the same layers switched off: (first, second)."""
    computed = {(row["worker"], row["step"], row["attempt"]): row for row in _of(rows, "gradients")}
    for (worker, step, attempt), row in computed.items():
        second = computed.get((worker, step, attempt + 1))
        if second is not None and row["switched_off"] == second["switched_off"]:
            yield row, second


# State


def _states(rows: Sequence[Row]) -> Iterator[Finding]:
    for first, second in _side_by_side(rows):
        names = _unlike(first["fingerprints"], second["fingerprints"])
        if names:
            yield Finding(
                f"the worker that joined has another state than the first one before step {first['step']}",
                _listed(names),
                "compute what is set from a batch, the time or the rank before prepare, equally on all workers; give "
                "prepare, or job.track, each object that changes it",
            )
            return


def _objects(rows: Sequence[Row]) -> Iterator[Finding]:
    found: dict[str, str] = {}
    for first, second in _side_by_side(rows):
        for kind, shape in {(o["kind"], tuple(o["shape"])) for o in first["objects"]}:
            own, other = (_alike(row["objects"], kind, shape) for row in (first, second))
            if len(own) == len(other) and any(_unlike(a, b) for a, b in zip(own, other, strict=True)):
                found[kind] = f"before step {first['step']}"
            else:
                found.pop(kind, None)
    averages = {each["kind"] for row in _of(rows, "state") for each in row["objects"] if each.get("averages")}
    for kind in sorted(averages - found.keys()):
        yield Finding(
            f"an object of class {kind} averages weights and is neither prepared nor tracked",
            "a worker that joins, or a training that resumes, begins with an average of its own",
            f"job.track({kind.lower()}=...) carries it to joiners and into checkpoints",
        )
    for kind, when in found.items():
        yield Finding(
            f"an object of class {kind} has other values on the worker that joined than on the first one",
            f"it is neither prepared nor tracked, and differs {when}",
            f"job.track({kind.lower()}=...) carries it to joiners and into checkpoints; or build it from a fixed seed",
        )


def _variables(rows: Sequence[Row]) -> Iterator[Finding]:
    """Look at all steps before which both workers have recorded them: what an epoch counts begins again in the next."""
    pairs = [*_side_by_side(rows)]
    paths = {path for pair in pairs for path in _unlike(*(row.get("variables", {}) for row in pair))}
    unlike = sorted({variable_of(path) for path in paths})
    kept = {name for pair in pairs for row in pair for name in row.get("kept_states", ())}
    why = "a worker that joins, or a training that resumes, begins with their first values"
    keep = "keep them in an object that job.track carries"
    count = f"{keep}, and count iterations by job.step or job.position.index, unless they are only printed"
    for names, fails in (([n for n in unlike if n in kept], True), ([n for n in unlike if n not in kept], False)):
        if names:
            yield Finding(
                f"variables of the loop have other values on the worker that joined: {_listed(names)}",
                f"they hold states of the model, and {why}" if fails else why,
                keep if fails else count,
                fails=fails,
            )


def _alike(objects: list[Row], kind: str, shape: tuple[str, ...]) -> list[Fingerprints]:
    """The fingerprints of all objects of one kind and shape, in an order that does not depend on the process."""
    chosen = [each["fingerprints"] for each in objects if each["kind"] == kind and tuple(each["shape"]) == shape]
    return sorted(chosen, key=lambda fingerprints: sum(abs(value[1]) for value in fingerprints.values()))


def _gathered(rows: Sequence[Row]) -> Iterator[Finding]:
    """Sharded state: each step begins with one state, however often it begins and with however many workers."""
    first: dict[int, Row] = {}
    for row in sorted(_of(rows, "gathered"), key=lambda row: (int(row["step"]), row["worker"])):
        before = first.setdefault(row["step"], row)
        names = _other_sums(before["sums"], row["sums"])
        if names:
            sizes = f"with {before['workers']} and with {row['workers']} workers"
            yield Finding(
                f"step {row['step']} begins with different sharded states ({sizes}; after a resharding, a repeated "
                "step or a return to a checkpoint)",
                _listed(names),
                "what changes parameters, buffers or optimizer state outside of optimizer.step has to be in an object "
                "that prepare or job.track carries; its load_state_dict has to restore all that its state_dict returns",
            )
            return


def _other_sums(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in set(one) | set(other) if one.get(name) != other.get(name))


def _checkpoint(rows: Sequence[Row]) -> Iterator[Finding]:
    for row in _of(rows, "unsaved"):
        yield Finding("the state cannot be written to a checkpoint and read again", row["message"], "see the message")
    compared = [(row, _unlike(row["before"], row["after"])) for row in _of(rows, "loaded")]
    compared += [(row, _other_sums(row["before"], row["after"])) for row in _of(rows, "reread")]
    for _row, names in compared:
        if names:
            yield Finding(
                "a checkpoint that is read again holds another state",
                _listed(names),
                "load_state_dict of a prepared or tracked object has to restore all that its state_dict returns",
            )


def _side_by_side(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Each step before which both workers recorded their state, after the one that the second one joined in."""
    recorded = {(row["worker"], row["step"]): row for row in _of(rows, "state")}
    for (worker, step), row in sorted(recorded.items(), key=lambda item: item[0][1]):
        second = recorded.get((SECOND, step))
        if worker == FIRST and second is not None and step > JOINED:
            yield row, second


# Fingerprints


def _of(rows: Sequence[Row], what: str) -> list[Row]:
    return [row for row in rows if row["what"] == what]


def _norm(fingerprints: Fingerprints) -> float:
    return math.sqrt(sum(norm**2 for norm, _ in fingerprints.values()))


def _distance(one: list[float], other: list[float]) -> float:
    """Return the distance of two fingerprints; equal non-finite values have distance 0."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if not (a == b or (math.isnan(a) and math.isnan(b)))]
    return max((abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs), default=0.0)


def _differing(before: Row, after: Row, limit: float) -> list[str]:
    """Names of the gradients that differ by more than `limit` of the norm of all; with "exact", at all."""
    one, other = before["fingerprints"], after["fingerprints"]
    allowed = 0.0 if before["exact"] else limit * max(_norm(one), _norm(other)) + before["resolution"]
    return [name for name in one if _distance(one[name], other[name]) > allowed]


def _off(before: Row, after: Row) -> float:
    """The largest difference, in the norm of all gradients."""
    norm = max(_norm(before["fingerprints"]), _norm(after["fingerprints"])) or 1.0
    return (
        max(_distance(before["fingerprints"][name], after["fingerprints"][name]) for name in before["fingerprints"])
        / norm
    )


def _unlike(one: Fingerprints, other: Fingerprints) -> list[str]:
    """Names of the tensors and numbers that two workers have with other values, or that one of them lacks."""
    found = sorted(set(one) ^ set(other))
    for name in set(one) & set(other):
        finite = (abs(value) for value in (*one[name], *other[name]) if math.isfinite(value))
        allowed = STATE_TOLERANCE * max(finite, default=0.0)
        if _distance(one[name], other[name]) > allowed + 1e-9:
            found.append(name)
    return sorted(found)


def _hint(before: Fingerprints, after: Fingerprints) -> str:
    names = [name for name in before if _distance(before[name], after.get(name, before[name])) > 0]
    return f"; attributes that have changed meanwhile: {_listed(names)}" if names else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
