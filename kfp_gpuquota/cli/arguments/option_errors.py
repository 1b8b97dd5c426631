"""A refused value, in the words of the command line: the option as it is written, the value as it was typed.

The API names fields and their converted values (`gpu_memory_mib is 19074`); a user who typed `--gpu-memory 20G` looks
for that text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from typer.core import TyperCommand

from kfp_gpuquota.errors import InvalidFieldError, UsageError, as_typed, shortened

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

_PARAMETERS: Final = {
    "gpu_fraction": "gpus",
    "gpus": "gpus_per_node",
    "gpu_fraction_limit": "gpu_limit",
    "gpu_fraction_limit.default": "gpu_limit",
    "gpu_fraction_limit.most": "gpu_limit_most",
    "gpu_fraction_limit.forced": "gpu_limit_forced",
    "gpu_memory_limit_mib.default": "gpu_memory_limit",
    "gpu_memory_limit_mib.most": "gpu_memory_limit_most",
    "gpu_memory_limit_mib.forced": "gpu_memory_limit_forced",
    "kind": "interactive",
    "guaranteed_cpu": "cpu",
    "limit_cpu": "cpu_limit",
    "guaranteed_memory_mib": "memory",
    "limit_memory_mib": "memory_limit",
    "over_quota_weight": "weight",
    "pools": "pool",
    "tolerations": "toleration",
    "gpu_types": "gpu_type",
    "working_directory": "working_dir",
    "memory_per_node_mib": "memory_per_node",
    "usage_half_life_s": "usage_half_life",
    "keep_ended_s": "keep_ended_days",
    "grace_period_s": "grace_period",
    "restart_window_s": "restart_window",
    "cool_down_s": "cool_down",
    "min_run_time_s": "min_run_time",
    "idle.warn_after_s": "idle_warn",
    "idle.suspend_after_s": "idle_suspend",
    "default_runtime_s": "default_time",
    "max_runtime_s": "max_time",
    "min_runtime_s": "min_runtime",
    "reserve_after_s": "reserve_after",
    "defragmentation.window": "defragment",
    "defragmentation.time_zone": "defragment",
}
"""The parameter of a command for a field of the API where their names differ by more than a unit."""

_WORDS: Final = "gpuquota.words"
_PLAIN: Final = re.compile(r"[\w.:/+=-]+")
_WORD: Final = re.compile(
    r"(?<![-\w'.])((?:[a-z_]+\.)?[a-z]+(?:_[a-z]+)+|gpus)\b(, which is (?:[\w.]+)(?: \([^)]*\))?)?"
)


class Command(TyperCommand):
    """A command whose refused values are reported in its own options; `--dry-run` may lack its value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words behind the command."""
        end = args.index("--") if "--" in args else len(args)
        words = args[:end]
        if any("--dry-run" in one.opts and not getattr(one, "is_flag", False) for one in self.params):
            words = list(_with_dry_run(words))
        ctx.meta[_WORDS] = [word.partition("=")[0] for word in words]
        return super().parse_args(ctx, [*words, *args[end:]])

    def invoke(self, ctx: Any) -> Any:
        """Run it. Raises UsageError for a value that is refused."""
        try:
            return super().invoke(ctx)
        except InvalidFieldError as error:
            words = ctx.meta.get(_WORDS, ())
            raise UsageError(reworded(error, self.params, ctx.params, words)) from None


def _with_dry_run(words: Sequence[str]) -> Iterator[str]:
    """Yield the words with the value of each `--dry-run` behind its "=": the next word, if that is one, or client."""
    from kfp_gpuquota.cli.arguments.options import DryRun  # noqa: PLC0415 (`gpuquota --help` does without)

    joined = False
    for before, word, following in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word == "--dry-run" and before != "--args":
            joined = following in set(DryRun)
            yield f"{word}={following if joined else 'client'}"
        elif not joined:
            yield word
        else:
            joined = False


def reworded(
    error: InvalidFieldError, parameters: Sequence[Any], typed: Mapping[str, object], words: Collection[str] = ()
) -> str:
    """Return the sentence of the error with options and typed values in the place of fields and converted ones.

    `words` are those of the command line: of an option with several names the one that is among them is used.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    parameter = by_name.get(_parameter_name(error.field, by_name))
    if parameter is None or not error.rule:
        return error.message
    rule = _WORD.sub(lambda found: _option_in_rule(found, by_name, typed, words), error.rule)
    value = typed.get(parameter.name)
    if value is True:
        return f"{_spelled(parameter, words)} is given, but {rule}"
    if not value and value != 0:
        if not parameter.opts[0].startswith("-"):
            return f"no {_spelled(parameter, words)} is given, but {rule}"
        return error.message.replace(error.field, _spelled(parameter, words), 1).replace(error.rule, rule)
    return f"{_spelled(parameter, words)} is {_shown(value)}, but {rule}"


def _parameter_name(field: str, by_name: Mapping[str, object]) -> str:
    """The parameter that a field is set by; the field where there is none."""
    for name in (_PARAMETERS.get(field, ""), field, *(field.removesuffix(unit) for unit in ("_mib", "_s", "_at"))):
        if name in by_name:
            return name
    return field


def _option_in_rule(
    found: re.Match[str], by_name: Mapping[str, Any], typed: Mapping[str, object], words: Collection[str]
) -> str:
    parameter = by_name.get(_parameter_name(found[1], by_name))
    if parameter is None:
        return found[0]
    value = typed.get(parameter.name)
    if not found[2]:
        return _spelled(parameter, words)
    return (
        f"{_spelled(parameter, words)}, which is {_shown(value)}"
        if value
        else f"{_spelled(parameter, words)}{found[2]}"
    )


def _spelled(parameter: Any, words: Collection[str]) -> str:
    """Return the option's long form, one of the `words` if any is; of an argument its name in the usage."""
    long = [each for each in parameter.opts if each.startswith("--")] or list(parameter.opts)
    option: str = next((each for each in long if each in words), long[0])
    if option.startswith("-"):
        return option
    return str(parameter.metavar or option).removeprefix("-- ").split()[0].strip("[].").upper()


def _shown(value: object) -> str:
    """The value as it was typed; in quotes where it could be mistaken for words of the sentence."""
    if isinstance(value, list | tuple):
        return " ".join(map(_shown, value))
    text = shortened(str(as_typed(value)))
    return text if _PLAIN.fullmatch(text) else repr(text)
