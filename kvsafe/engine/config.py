# SPDX-License-Identifier: Apache-2.0
"""What the operator may set, and which engines we accept: one table each, checked once at start.

`parse_config` turns `kv_connector_extra_config` into a `KVSafeConfig` or refuses with every problem
at once. `check_engine` compares what the engine reports with what was proven; each complaint names
the override that lets it through. Nothing here imports vllm: keys that vLLM's own classes read keep
the meaning they have there (vLLM 0.32: `v1/kv_offload/{base,cpu/spec,tiering/spec}.py`,
`kv_connector/v1/offloading/config.py`). Values of secrets and of unknown keys are never shown.
"""

import copy
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Final, Literal, get_type_hints

import msgspec

SPEC_NAME: Final = "KVSafeSpec"
SPEC_MODULE_PATH: Final = "kvsafe.engine.spec"
MAX_SIZE: Final = 1 << 60
MAX_DEADLINE_S: Final = 3600.0
MAX_THREADS: Final = 256

PROVEN_VLLM_VERSIONS: Final = ("0.32.0",)
PROVEN_KV_DTYPES: Final = ("auto", "bfloat16", "float16", "float32")
PROVEN_MODEL_DTYPES: Final = ("bfloat16", "float16", "float32")
PROVEN_KV_QUANT_MODES: Final = ("NONE",)
PROVEN_KV_LAYOUTS: Final[tuple[str | None, ...]] = (None, "LBHNC", "LBNHC")
PROVEN_GROUP_KINDS: Final = ("full_attention", "sliding_window", "mla")
PROVEN_GROUP_MIXES: Final[tuple[frozenset[str], ...]] = (
    frozenset({"full_attention", "sliding_window"}),
)
"""Different group kinds proven together in one model; a single proven kind needs no entry."""
PROVEN_HASH_ALGOS: Final = ("sha256", "sha256_cbor")
PROVEN_EXECUTORS: Final = (None, "uni", "mp")
PROVEN_PLATFORMS: Final = ("cpu", "cuda")
PROVEN_TIER_TYPES: Final = ("fs",)
UNPROVEN_TIER_TYPES: Final = ("example", "obj", "p2p", "kvcr")

_NO_SECRETS: Final = (
    "keys never come from this JSON, it gets logged: put the key into a file named by key_file, "
    "or into an environment variable named by key_env"
)
_SECRET_NAME: Final = re.compile(
    r"key|keys|token|secrets?|.*secret.*|.*passw.*|.*passphrase.*|.*hmac.*|.*_key"
    r"|key_(hex|base64|b64|bytes|material|value|data)"
)
_REFUSED_KEYS: Final = {
    "max_tracker_size": "it belongs to store_threshold, which the tiering manager does not support",
}


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong: where (dotted path), what was found, what is allowed, what to do."""

    key: str
    found: str
    allowed: str = ""
    hint: str = ""

    def __str__(self) -> str:
        allowed = f"; allowed: {self.allowed}" if self.allowed else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.key}: found {self.found}{allowed}{hint}"


class ConfigError(ValueError):
    """The configuration, or the engine under it, is refused. `problems` holds all of them."""

    SHOWN: Final = 40

    def __init__(self, title: str, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        lines = [f"  - {problem}" for problem in self.problems[: self.SHOWN]]
        if len(self.problems) > self.SHOWN:
            lines.append(f"  - and {len(self.problems) - self.SHOWN} more")
        super().__init__("\n".join([title, *lines]))


class _Refused(Exception):
    """Raised by a check; keys are relative to the option that was checked."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__()
        self.problems = problems


Check = Callable[[object], object]


class Option(msgspec.Struct, frozen=True):
    """How one key is checked and documented. `check` returns the clean value or refuses."""

    kind: str
    doc: str
    check: Check
    origin: Literal["vllm", "kvsafe", "override"] = "kvsafe"
    default: str = ""
    required: bool = False


# --- what was found, in words -----------------------------------------------------------------


def _describe(value: object) -> str:
    """Describe any value in at most some 80 characters, without calling into foreign code."""
    if value is None:
        return "null"
    if type(value) is bool:
        return f"the boolean {str(value).lower()}"
    if type(value) is int:
        # Python refuses to print very long integers.
        long = value.bit_length() > 128
        return f"an integer of {value.bit_length()} bits" if long else f"the integer {value}"
    if type(value) is float:
        return f"the number {value!r}"
    if type(value) is str:
        return f"the text {_quote(value)}"
    if type(value) in (list, tuple):
        return "a list"
    if type(value) is dict:
        return "an object"
    return f"a value of type {_quote(type(value).__name__)}"


def _quote(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")


def _refuse(value: object, allowed: str, hint: str = "") -> _Refused:
    return _Refused(Problem("", _describe(value), allowed, hint))


def _join(prefix: str, key: str) -> str:
    return f"{prefix}{key}" if not prefix or not key or key[0] == "[" else f"{prefix}.{key}"


# --- checks of single values ------------------------------------------------------------------


def _check_bool(value: object) -> bool:
    if type(value) is not bool:
        raise _refuse(value, "true or false, without quotes")
    return value


def _int_between(low: int, high: int) -> Check:
    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _refuse(value, f"an integer from {low} to {high}")
        return value

    return check


def _check_seconds(value: object) -> float:
    # Not-a-number fails both comparisons.
    if (type(value) is int or type(value) is float) and 0 < value <= MAX_DEADLINE_S:
        return float(value)
    raise _refuse(value, f"a number of seconds above 0, at most {MAX_DEADLINE_S:g}")


def _number_between(low: float, high: float) -> Check:
    def check(value: object) -> float:
        if (type(value) is int or type(value) is float) and low <= value <= high:
            return float(value)
        raise _refuse(value, f"a number from {low:g} to {high:g}")

    return check


def _one_of(*choices: str) -> Check:
    def check(value: object) -> str:
        if type(value) is not str or value not in choices:
            near = _nearest(value, choices) if type(value) is str else ""
            raise _refuse(value, ", ".join(choices), near)
        return value

    return check


def _matching(pattern: str, allowed: str, *, show: bool = True) -> Check:
    compiled = re.compile(pattern)

    def check(value: object) -> str:
        if type(value) is not str:
            raise _refuse(value, allowed)
        if compiled.fullmatch(value) is None:
            found = _describe(value) if show else "a text of another form"
            raise _Refused(Problem("", found, allowed))
        return value

    return check


_UNITS: Final[Mapping[str, int]] = {
    "B": 1,
    **{f"{letter}B": 1000**n for n, letter in enumerate("kMGT", 1)},
    **{f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", 1)},
    "KB": 1000,
}
_SIZE: Final = re.compile(r" *([0-9]{1,20}(?:\.[0-9]{1,12})?) *([A-Za-z]{0,4}) *")
_SIZE_KIND: Final = 'a number of bytes such as 8589934592, or a text such as "8GiB" or "10 GB"'


def parse_size(value: object) -> int:
    """Read a size in bytes (1 to 2**60) from an int or a text with a unit; refuses anything else.

    Units are exact: kB, MB, GB, TB count in thousands, KiB, MiB, GiB, TiB in 1024. Raises
    `ConfigError` with the key "size".
    """
    try:
        return _check_size(value)
    except _Refused as refused:
        raise ConfigError("not a size:", _under("size", refused.problems)) from None


def _check_size(value: object) -> int:
    if type(value) is int:
        size = Fraction(value)
    elif type(value) is str:
        size = _size_of_text(value)
    else:
        raise _refuse(value, _SIZE_KIND)
    if size.denominator != 1:
        raise _refuse(value, _SIZE_KIND, "not a whole number of bytes")
    if not 1 <= size <= MAX_SIZE:
        raise _refuse(value, _SIZE_KIND, "from 1 byte to 2**60")
    return size.numerator


def _size_of_text(text: str) -> Fraction:
    match = _SIZE.fullmatch(text) if len(text) <= 64 else None
    if match is None:
        raise _refuse(text, _SIZE_KIND)
    number, unit = str(match[1]), str(match[2])
    if not unit:
        raise _refuse(text, _SIZE_KIND, "a text needs a unit; a plain number has no quotes")
    if unit not in _UNITS:
        raise _refuse(text, _SIZE_KIND, _unit_hint(unit))
    return Fraction(number) * _UNITS[unit]


def _unit_hint(unit: str) -> str:
    letter = unit[0].upper()
    if len(unit) == 1 and letter in "KMGT":
        return f"{unit} is ambiguous: {letter}B counts in thousands, {letter}iB in 1024"
    near = [known for known in _UNITS if known.lower() == unit.lower()]
    return f"did you mean {near[0]}?" if near else f"units: {', '.join(sorted(_UNITS))}"


_PATH_KIND: Final = "an absolute path with no '..' (~/ is the home folder)"


def _check_path(value: object) -> str:
    if type(value) is not str:
        raise _refuse(value, _PATH_KIND)
    if len(value) > 4096 or not value.isprintable():
        raise _Refused(Problem("", "a path too long or with unprintable characters", _PATH_KIND))
    if not value.startswith(("/", "~/")) or ".." in value.split("/"):
        raise _refuse(value, _PATH_KIND)
    return value if value.startswith("~/") else os.path.normpath("/" + value.lstrip("/"))


def _check_key_file(value: object) -> str:
    try:
        return _check_path(value)
    except _Refused:
        # Not shown: somebody may have put the key itself here.
        raise _Refused(Problem("", "no such path (not shown)", _PATH_KIND)) from None


_JSON_DEPTH: Final = 16
_JSON_NODES: Final = 4096


def _check_json(value: object) -> object:
    """Copy plain JSON of bounded depth and size: the options of tiers that are not ours."""
    left = [_JSON_NODES]

    def copied(item: object, depth: int) -> object:
        left[0] -= 1
        if depth > _JSON_DEPTH or left[0] < 0:
            limit = f"depth {_JSON_DEPTH}, {_JSON_NODES} values"
            raise _Refused(Problem("", "JSON too deep or too large", limit))
        if item is None or type(item) in (bool, int, str):
            return item
        if type(item) is float and math.isfinite(item):
            return item
        if type(item) in (list, tuple) and isinstance(item, Sequence):
            return [copied(part, depth + 1) for part in item]
        if type(item) is dict and all(type(key) is str for key in item):
            return {key: copied(part, depth + 1) for key, part in item.items()}
        raise _Refused(Problem("", f"{_type_name(item)} inside", "plain JSON"))

    return copied(value, 0)


def _type_name(value: object) -> str:
    return f"a value of type {_quote(type(value).__name__)}"


# --- tables of keys ---------------------------------------------------------------------------


def _read_table(
    table: Mapping[str, Option], raw: Mapping[object, object], problems: list[Problem], at: str = ""
) -> dict[str, object]:
    """Check every key of `raw` against the table; return the good values, append the problems."""
    values: dict[str, object] = {}
    for key, value in raw.items():
        if type(key) is not str:
            problems.append(Problem(_join(at, "(key)"), _describe(key), "text as a key"))
        elif key not in table:
            problems.append(_unknown(_join(at, _name(key)), key, table))
        else:
            try:
                values[key] = table[key].check(value)
            except _Refused as refused:
                problems.extend(_under(_join(at, key), refused.problems))
    for key, option in table.items():
        if option.required and key not in raw:
            problems.append(Problem(_join(at, key), "nothing", option.kind, "this key is required"))
    return values


def _under(prefix: str, problems: Iterable[Problem]) -> list[Problem]:
    return [msgspec.structs.replace(p, key=_join(prefix, p.key)) for p in problems]


def _name(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", key) else _quote(key)


def _unknown(path: str, key: str, known: Iterable[str]) -> Problem:
    plain = key[:60].lower().replace("-", "_")
    if _SECRET_NAME.fullmatch(plain):
        return Problem(path, "a key or secret (not shown)", "", _NO_SECRETS)
    if key in _REFUSED_KEYS:
        return Problem(path, "a key that is not supported", "", _REFUSED_KEYS[key])
    return Problem(path, "an unknown key", "", _nearest(plain, known) or "see the option table")


def _nearest(text: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(text[:60].lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


_MODULE: Final = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){0,15}"
_check_module = _matching(_MODULE, "a Python module path such as my_package.my_module")
_EMA: Final = "EMABackpressureDetector"


def _class_of(*built_in: str) -> Check:
    """A class that vLLM has under a plain name, or any `module.ClassName`."""

    def check(value: object) -> str:
        allowed = f"{', '.join(built_in)}, or module.ClassName"
        if type(value) is str and (value in built_in or _is_dotted(value)):
            return value
        near = _nearest(value, built_in) if type(value) is str else ""
        raise _refuse(value, allowed, near)

    return check


def _is_dotted(value: object) -> bool:
    return type(value) is str and "." in value and re.fullmatch(_MODULE, value) is not None


BACKPRESSURE: Final[Mapping[str, Option]] = {
    "backpressure_cls": Option("text", f"`{_EMA}`, or `module.ClassName`", _class_of(_EMA)),
    "policy_cls": Option(
        "text",
        "`ThrottledDropPolicy`, `DropStorePolicy`, or `module.ClassName`",
        _class_of("ThrottledDropPolicy", "DropStorePolicy"),
    ),
    "high_water_s": Option("number", "pressure begins (s/MiB)", _number_between(0, 3600)),
    "low_water_s": Option("number", "pressure ends (s/MiB)", _number_between(0, 3600)),
    "alpha": Option("number", "weight of the newest sample", _number_between(1e-6, 1)),
    "warmup_completions": Option("integer", "stores before judging", _int_between(0, 1 << 20)),
    "decay_half_life_s": Option("number", "decay when idle (s)", _number_between(0, 3600)),
    "cooldown_s": Option("number", "half rate after pressure (s)", _number_between(0, 3600)),
}


def _check_backpressure(value: object) -> dict[str, object]:
    """Check one backpressure object; a detector class of somebody else takes what it likes."""
    if type(value) is not dict:
        raise _refuse(value, "an object with the keys " + ", ".join(BACKPRESSURE))
    if _is_dotted(value.get("backpressure_cls")):
        copied = _check_json(value)
        return copied if isinstance(copied, dict) else {}
    problems: list[Problem] = []
    values = _read_table(BACKPRESSURE, value, problems)
    if problems:
        raise _Refused(*problems)
    return values


FS_TIER: Final[Mapping[str, Option]] = {
    "type": Option("text", "`fs`", _one_of("fs"), required=True),
    "root_dir": Option(
        "path", "Folder of the chunk files; our state and key file lie outside it.", _check_path,
        required=True,
    ),
    "n_read_threads": Option("integer", "Threads that prefer reads.", _int_between(1, MAX_THREADS)),
    "n_write_threads": Option(
        "integer", "Threads that prefer writes.", _int_between(1, MAX_THREADS)
    ),
    "enable_kv_events": Option("boolean", "Emit KV events for stored chunks.", _check_bool),
    "locality": Option("text", "`LOCAL` or `REMOTE`.", _one_of("LOCAL", "REMOTE")),
    "backpressure": Option("object", "Overrides the top level, key by key.", _check_backpressure),
}  # fmt: skip


class TierConfig(msgspec.Struct, frozen=True):
    """One secondary tier. `options` is everything but `type` and `module_path`, as checked."""

    type: str
    module_path: str | None
    options: dict[str, object]

    @property
    def proven(self) -> bool:
        """Whether the conformance suite covers this tier type."""
        return self.type in PROVEN_TIER_TYPES

    @property
    def root_dir(self) -> str | None:
        """The folder that the tier writes, where its options name one."""
        root = self.options.get("root_dir")
        return root if isinstance(root, str) else None

    def to_vllm(self) -> dict[str, object]:
        """A fresh dict for vLLM's tier factory (it changes the dict it gets)."""
        module = {} if self.module_path is None else {"module_path": self.module_path}
        return {"type": self.type, **module, **copy.deepcopy(self.options)}

    def __repr__(self) -> str:
        # Options of other people's tiers may hold credentials.
        return f"TierConfig(type={self.type!r}, options={sorted(self.options)})"


def _check_tiers(value: object) -> tuple[TierConfig, ...]:
    if type(value) is not list or len(value) > 64:
        raise _refuse(value, "a list of at most 64 tier objects")
    problems: list[Problem] = []
    tiers: list[TierConfig] = []
    for place, item in enumerate(value):
        try:
            tiers.append(_check_tier(item))
        except _Refused as refused:
            problems.extend(_under(f"[{place}]", refused.problems))
    if problems:
        raise _Refused(*problems)
    return tuple(tiers)


def _check_tier(value: object) -> TierConfig:
    if type(value) is not dict:
        raise _refuse(value, "an object with at least the key type")
    kind = value.get("type")
    known = (*PROVEN_TIER_TYPES, *UNPROVEN_TIER_TYPES)
    allowed = f"{', '.join(known)}, or a class name together with module_path"
    if type(kind) is not str or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,127}", kind):
        found = _describe(kind) if "type" in value else "nothing"
        raise _Refused(Problem("type", found, allowed))
    if kind not in known and "module_path" not in value:
        raise _Refused(Problem("type", _describe(kind), allowed, _nearest(kind, known)))
    if kind in known and "module_path" in value:
        hint = f"{kind} is built in: leave module_path out"
        raise _Refused(Problem("module_path", "a key without effect", "", hint))
    return _check_fs_tier(value) if kind == "fs" else _check_other_tier(kind, value)


def _check_fs_tier(raw: dict[object, object]) -> TierConfig:
    problems: list[Problem] = []
    values = _read_table(FS_TIER, raw, problems)
    if problems:
        raise _Refused(*problems)
    del values["type"]
    return TierConfig("fs", None, values)


def _check_other_tier(kind: str, raw: dict[object, object]) -> TierConfig:
    """Options of tiers that are not ours pass through as they are, as plain JSON."""
    copied = _check_json(raw)
    options = copied if isinstance(copied, dict) else {}
    del options["type"]
    checks: tuple[tuple[str, Check], ...] = (
        ("module_path", _check_module),
        ("backpressure", _check_backpressure),
    )
    for key, check in checks:
        try:
            options.update({key: check(options[key])} if key in options else {})
        except _Refused as refused:
            raise _Refused(*_under(key, refused.problems)) from None
    module = options.pop("module_path", None)
    return TierConfig(kind, module, options)


def _check_policy(value: object) -> str:
    allowed = "lru, arc, or a class name together with cache_policy_module_path"
    return str(_matching(r"[A-Za-z_][A-Za-z0-9_]{0,127}", allowed)(value))


def _check_canonical_layout(value: object) -> bool:
    if _check_bool(value):
        raise _refuse(value, "false", "chunks portable between topologies are not proven yet")
    return False


def _check_store_threshold(value: object) -> int:
    if type(value) is not int or not 0 <= value <= 1:
        hint = "the tiering manager cannot count offers; 0 and 1 both mean: store at once"
        raise _refuse(value, "0 or 1", hint)
    return value


def small_thread_count() -> int:
    """Default number of threads: half the CPUs this process may use, from 1 to 4."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


_POSITIVE: Final = _int_between(1, 1 << 31)
_OURS_ONLY: Final = "only this value: another spec class would not check anything"


def _override(doc: str) -> Option:
    return Option("boolean", doc, _check_bool, "override")


class KVSafeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the operator set, checked and completed. Sizes in bytes, deadlines in seconds."""

    cpu_bytes_to_use: Annotated[
        int,
        Option(
            "size", "Host memory for rows, headers included.", _check_size, "vllm", required=True
        ),
    ]
    block_size: Annotated[
        int | None,
        Option("integer", "Tokens per chunk; not with `blocks_per_chunk`.", _POSITIVE, "vllm"),
    ] = None
    blocks_per_chunk: Annotated[
        int | None,
        Option("integer", "Blocks per chunk; not with `block_size`.", _POSITIVE, "vllm"),
    ] = None
    eviction_policy: Annotated[
        str,
        Option(
            "text",
            "`lru`, `arc`, or a class in `cache_policy_module_path`.",
            _check_policy,
            "vllm",
        ),
    ] = "lru"
    cache_policy_module_path: Annotated[
        str | None,
        Option("text", "Module of an eviction policy that is not built in.", _check_module, "vllm"),
    ] = None
    secondary_tiers: Annotated[
        tuple[TierConfig, ...],
        Option("list of objects", "What lies behind the rows (below).", _check_tiers, "vllm"),
    ] = ()
    backpressure: Annotated[
        dict[str, object] | None,
        Option(
            "object",
            "When a slow tier drops stores; the default of every tier (below).",
            _check_backpressure,
            "vllm",
        ),
    ] = None
    offload_prompt_only: Annotated[
        bool, Option("boolean", "Store prompt blocks only, not decoded ones.", _check_bool, "vllm")
    ] = True
    self_describing_kv_events: Annotated[
        bool, Option("boolean", "KV events carry tokens and parents.", _check_bool, "vllm")
    ] = False
    canonical_layout: Annotated[
        bool,
        Option(
            "boolean", "Only false: portable chunks are unproven.", _check_canonical_layout, "vllm"
        ),
    ] = False
    store_threshold: Annotated[
        int,
        Option("integer", "Only 0 or 1, both mean: store at once.", _check_store_threshold, "vllm"),
    ] = 0
    spec_name: Annotated[str, Option("text", _OURS_ONLY, _one_of(SPEC_NAME), "vllm")] = SPEC_NAME
    spec_module_path: Annotated[
        str, Option("text", _OURS_ONLY, _one_of(SPEC_MODULE_PATH), "vllm")
    ] = SPEC_MODULE_PATH

    suite: Annotated[
        str,
        Option(
            "text",
            "`blake3-keyed`; `hmac-sha256` where FIPS algorithms are asked for; `blake3` has no "
            "key: it finds accidents, not attackers.",
            _one_of("blake3-keyed", "hmac-sha256", "blake3"),
        ),
    ] = "blake3-keyed"
    key_file: Annotated[
        str | None,
        Option(
            "path",
            "Key file (0600, outside every store), made on first use. Not with `key_env`.",
            _check_key_file,
            default="`keys.json` in `state_dir`",
        ),
    ] = None
    key_env: Annotated[
        str | None,
        Option(
            "text",
            "Name of the environment variable that holds the key: 32 bytes as base64 or hex.",
            _matching("[A-Za-z_][A-Za-z0-9_]{0,40}", "the name of a variable", show=False),
        ),
    ] = None
    state_dir: Annotated[
        str,
        Option(
            "path",
            "Folder of epoch and key file; outside every tier's `root_dir`.",
            _check_path,
            default="`$XDG_STATE_HOME/kvsafe` or `~/.local/state/kvsafe`",
        ),
    ]
    namespace: Annotated[
        str,
        Option(
            "text",
            "Chunks of one namespace are never served in another.",
            _matching("[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "1 to 64 of A-Z a-z 0-9 . _ -"),
        ),
    ] = "default"
    weights_digest: Annotated[
        str,
        Option(
            "text",
            "`auto` reads the weight files; or what you know about them: `blake3:` or `sha256:` "
            "and 64 lower-case hex digits.",
            _matching(
                "auto|(blake3|sha256):[0-9a-f]{64}",
                "auto, or blake3: or sha256: and 64 lower-case hex digits",
            ),
        ),
    ] = "auto"
    quarantine: Annotated[
        str,
        Option(
            "text",
            "What becomes of a refused chunk: moved `aside`, `remove`d, or `keep`t in place.",
            _one_of("aside", "remove", "keep"),
        ),
    ] = "aside"
    verify_loads: Annotated[
        str,
        Option(
            "text",
            "`always` checks the payload before every load. `once` checks it at promotion and "
            "skips it while we do not write the row again: it gives up finding bytes that change "
            "in host memory after that (a memory fault, another process that writes the shared "
            "region).",
            _one_of("always", "once"),
        ),
    ] = "always"
    copy_threads: Annotated[
        int,
        Option(
            "integer",
            "Threads that copy between accelerator and rows, per worker.",
            _int_between(1, MAX_THREADS),
            default="half the CPUs, 1 to 4",
        ),
    ] = msgspec.field(default_factory=small_thread_count)
    verify_threads: Annotated[
        int,
        Option(
            "integer",
            "Threads that check payloads.",
            _int_between(1, MAX_THREADS),
            default="half the CPUs, 1 to 4",
        ),
    ] = msgspec.field(default_factory=small_thread_count)
    explain_misses: Annotated[
        bool, Option("boolean", "Log, without content, why a look-up missed.", _check_bool)
    ] = True
    load_deadline_s: Annotated[
        float, Option("seconds", "A load that takes longer is a miss.", _check_seconds)
    ] = 30.0
    store_deadline_s: Annotated[
        float, Option("seconds", "A store that takes longer is given up.", _check_seconds)
    ] = 60.0

    allow_unknown_weights: Annotated[
        bool, _override("Start when the weights cannot be told apart from others.")
    ] = False
    allow_untested_vllm: Annotated[bool, _override("Start on a vLLM version not tested.")] = False
    allow_unproven_kv_dtype: Annotated[
        bool, _override("Start with a KV dtype or KV quantisation not proven.")
    ] = False
    allow_unproven_kv_layout: Annotated[bool, _override("Start with a KV layout not proven.")] = (
        False
    )
    allow_unproven_groups: Annotated[
        bool,
        _override("Start with KV-cache groups not proven (Mamba, several kinds in one model)."),
    ] = False
    allow_unproven_spec_decode: Annotated[
        bool, _override("Start with speculative decoding on.")
    ] = False
    allow_unproven_tier: Annotated[
        bool, _override("Use a secondary tier that the conformance suite does not cover.")
    ] = False
    allow_weak_block_hash: Annotated[
        bool, _override("Start with block hashes that collide or do not survive a restart.")
    ] = False
    allow_multi_node: Annotated[
        bool, _override("Start with workers that may not share this machine's memory.")
    ] = False

    @property
    def active_overrides(self) -> tuple[str, ...]:
        """Names of the overrides that are set, for logs and metrics."""
        return tuple(name for name in OVERRIDES if getattr(self, name))

    @property
    def unproven_tiers(self) -> tuple[str, ...]:
        """Types of the tiers that `allow_unproven_tier` let through."""
        return tuple(tier.type for tier in self.secondary_tiers if not tier.proven)


def _options_of(struct: type[msgspec.Struct]) -> dict[str, Option]:
    """The options in a Struct's annotations, by key."""
    hints = get_type_hints(struct, include_extras=True)
    return {
        name: extra
        for name in struct.__struct_fields__
        for extra in getattr(hints[name], "__metadata__", ())
        if isinstance(extra, Option)
    }


OPTIONS: Final[Mapping[str, Option]] = _options_of(KVSafeConfig)
OVERRIDES: Final = tuple(name for name, o in OPTIONS.items() if o.origin == "override")


# --- the whole document -----------------------------------------------------------------------


def parse_config(extra: Mapping[str, object], *, environ: Mapping[str, str]) -> KVSafeConfig:
    """Read `kv_connector_extra_config`; called once, when the connector is built.

    Raises `ConfigError` with every problem found: unknown keys (with the nearest valid one), wrong
    types (nothing is converted), values out of range and combinations that are unsafe.
    """
    if not isinstance(extra, Mapping):
        raise ConfigError(_TITLE, [Problem(_WHOLE, _describe(extra), "an object")])
    problems: list[Problem] = []
    values = _read_table(OPTIONS, dict[object, object](extra.items()), problems)
    _place_files(values, extra, environ, problems)
    for rule in _CROSS_RULES:
        problems.extend(rule(values, environ))
    if problems:
        raise ConfigError(_TITLE, problems)
    return msgspec.convert(values, KVSafeConfig, strict=True)


_WHOLE: Final = "kv_connector_extra_config"
_TITLE: Final = f"kvsafe refuses {_WHOLE}:"

Values = dict[str, object]


def _place_files(
    values: Values, extra: Mapping[str, object], environ: Mapping[str, str], problems: list[Problem]
) -> None:
    """Fill in the default places and replace `~/` everywhere a path of ours may stand."""
    home = environ.get("HOME", "")
    if "state_dir" not in extra:
        values["state_dir"] = _default_state_dir(environ)
    for name in ("state_dir", "key_file"):
        if name in values:
            _expand(values, name, name, home, problems)
    tiers = values.get("secondary_tiers", ())
    for place, tier in enumerate(tiers if isinstance(tiers, tuple) else ()):
        if tier.type == "fs":
            _expand(tier.options, "root_dir", f"secondary_tiers[{place}].root_dir", home, problems)
    state_dir = values.get("state_dir")
    keyed = values.get("suite", "blake3-keyed") != "blake3"
    if keyed and isinstance(state_dir, str) and not {"key_file", "key_env"} & set(extra):
        values["key_file"] = os.path.join(state_dir, "keys.json")


def _default_state_dir(environ: Mapping[str, str]) -> str:
    # The XDG base directory specification has relative values ignored.
    base = environ.get("XDG_STATE_HOME", "")
    return os.path.join(base, "kvsafe") if base.startswith("/") else "~/.local/state/kvsafe"


def _expand(table: Values, name: str, path: str, home: str, problems: list[Problem]) -> None:
    """Replace a leading `~/` in `table[name]`; drop it with a problem when that gives no path."""
    given = table.pop(name)
    if isinstance(given, str) and given.startswith("~/"):
        if not home.startswith("/"):
            found = "no absolute HOME in the environment"
            problems.append(Problem(path, found, "an absolute path", f"set {path} or HOME"))
            return
        given = os.path.join(home, given[2:])
    try:
        table[name] = _check_path(given)
    except _Refused as refused:
        problems.extend(_under(path, refused.problems))


def _chunk_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    if "block_size" in values and "blocks_per_chunk" in values:
        return [Problem("block_size", "blocks_per_chunk as well", "one of the two")]
    return []


def _policy_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    policy = values.get("eviction_policy", "lru")
    module = values.get("cache_policy_module_path")
    if policy in ("lru", "arc") and module is not None:
        found = f"a module although eviction_policy is {policy}, which is built in"
        return [Problem("cache_policy_module_path", found, "nothing, or name its class")]
    if policy not in ("lru", "arc") and module is None:
        allowed = "lru, arc, or a class name together with cache_policy_module_path"
        near = _nearest(str(policy), ("lru", "arc"))
        return [Problem("eviction_policy", _describe(policy), allowed, near)]
    return []


def _key_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    sources = [name for name in ("key_file", "key_env") if name in values]
    if values.get("suite") == "blake3":
        hint = "leave it out, or choose blake3-keyed"
        return [Problem(name, "a key, but suite blake3 uses none", "", hint) for name in sources]
    if len(sources) == 2:
        return [Problem("key_env", "key_file as well", "one of the two")]
    variable = values.get("key_env")
    if isinstance(variable, str) and not environ.get(variable, "").strip():
        # Not shown: somebody may have put the key itself here.
        found = "a name of no variable that is set in this process"
        return [Problem("key_env", found, "the name of a variable that holds the key")]
    return []


def _tier_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    """Unproven tiers need their override, and no two tiers write the same folder."""
    problems: list[Problem] = []
    roots: dict[str, str] = {}
    for path, tier in _tiers(values):
        if not tier.proven and values.get("allow_unproven_tier", False) is not True:
            hint = "set allow_unproven_tier to true to use it all the same"
            proven = ", ".join(PROVEN_TIER_TYPES)
            problems.append(Problem(f"{path}.type", f"{tier.type}, not proven", proven, hint))
        if tier.root_dir is not None:
            first = roots.setdefault(_real(tier.root_dir), path)
            if first != path:
                problems.append(Problem(f"{path}.root_dir", f"the folder of {first}", "its own"))
    return problems


def _pressure_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    """What a tier gets is the top level overlaid with its own: that must be whole."""
    common = values.get("backpressure") or {}
    problems: list[Problem] = []
    for path, tier in _tiers(values):
        own = tier.options.get("backpressure")
        merged = {**(common if isinstance(common, dict) else {})}
        merged.update(own if isinstance(own, dict) else {})
        if not merged and own is None:
            continue
        where = f"{path}.backpressure"
        if "backpressure_cls" not in merged:
            problems.append(Problem(where, "no backpressure_cls here or above", _EMA))
        low, high = merged.get("low_water_s"), merged.get("high_water_s")
        if isinstance(low, float) and isinstance(high, float) and low > high:
            problems.append(Problem(where, f"low_water_s {low:g} above high_water_s {high:g}"))
    return problems


def _place_rule(values: Values, environ: Mapping[str, str]) -> list[Problem]:
    """Key and state lie outside every store: who may write chunks must not write those."""
    problems: list[Problem] = []
    for path, tier in _tiers(values):
        if tier.root_dir is None:
            continue
        root = _real(tier.root_dir)
        for name in ("state_dir", "key_file"):
            ours = values.get(name)
            if isinstance(ours, str) and (_inside(_real(ours), root) or _inside(root, _real(ours))):
                found = f"a folder that holds {name} or lies inside it"
                problems.append(Problem(f"{path}.root_dir", found, "a folder apart from it"))
    return problems


_CROSS_RULES: Final = (
    _chunk_rule, _policy_rule, _key_rule, _tier_rule, _pressure_rule, _place_rule,
)  # fmt: skip


def _tiers(values: Values) -> list[tuple[str, TierConfig]]:
    tiers = values.get("secondary_tiers", ())
    known = tiers if isinstance(tiers, tuple) else ()
    return [(f"secondary_tiers[{place}]", tier) for place, tier in enumerate(known)]


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:
        # A NUL or a lone surrogate from a pass-through tier: no such file can exist.
        return os.path.normpath("/" + path)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def to_vllm_extra(config: KVSafeConfig) -> dict[str, object]:
    """Give the dict that vLLM's spec classes read: vLLM's own keys only, sizes as integers.

    Fresh on every call, since vLLM writes into it. Keys left unset stay out.
    """
    named = ((name, getattr(config, name)) for name, o in OPTIONS.items() if o.origin == "vllm")
    extra = {name: copy.deepcopy(value) for name, value in named if value is not None}
    extra["secondary_tiers"] = [tier.to_vllm() for tier in config.secondary_tiers]
    return extra


# --- the engine under us ----------------------------------------------------------------------


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the effective configuration of the engine says, as plain values.

    Per-group tuples are in group order. `group_kinds` uses the words of `PROVEN_GROUP_KINDS`
    ("mamba" and others for what is not there); `kv_quant_modes` the member names of vLLM's
    `KVQuantMode`.
    """

    vllm_version: str
    nnodes: int
    world_size: int
    executor_backend: str | None
    kv_cache_dtype: str
    model_dtype: str
    kv_quant_modes: tuple[str, ...]
    kv_cache_layout: str | None
    group_kinds: tuple[str, ...]
    hash_algo: str
    none_hash_random: bool
    platform: str
    prefix_caching: bool
    spec_decode: bool


class Complaint(msgspec.Struct, frozen=True):
    """Something about the engine that is not proven.

    `override` names the option that lets it through. Level `warn` never stops the start.
    """

    key: str
    problem: str
    way_out: str
    override: str | None
    level: Literal["refuse", "warn"] = "refuse"


class _Rule(msgspec.Struct, frozen=True):
    key: str
    problem: Callable[[EngineFacts], str | None]
    way_out: str
    override: str | None
    level: Literal["refuse", "warn"] = "refuse"


def _bad_version(facts: EngineFacts) -> str | None:
    # A local part (+cpu, +cu129) names a build of the same release.
    release = facts.vllm_version.split("+", 1)[0]
    tested = ", ".join(PROVEN_VLLM_VERSIONS)
    return None if release in PROVEN_VLLM_VERSIONS else f"vLLM {release}; tested: {tested}"


def _bad_nodes(facts: EngineFacts) -> str | None:
    if facts.nnodes > 1:
        return f"{facts.nnodes} nodes under one scheduler: rows live in one machine's memory"
    if facts.world_size > 1 and facts.executor_backend not in PROVEN_EXECUTORS:
        return f"executor {facts.executor_backend} may place workers on other machines"
    return None


def _bad_dtype(facts: EngineFacts) -> str | None:
    if facts.kv_cache_dtype.removeprefix("torch.") not in PROVEN_KV_DTYPES:
        return f"KV dtype {facts.kv_cache_dtype}; proven: {', '.join(PROVEN_KV_DTYPES)}"
    model_dtype = facts.model_dtype.removeprefix("torch.")
    if facts.kv_cache_dtype == "auto" and model_dtype not in PROVEN_MODEL_DTYPES:
        return f"KV dtype auto means {model_dtype}; proven: {', '.join(PROVEN_MODEL_DTYPES)}"
    return None


def _bad_quant(facts: EngineFacts) -> str | None:
    bad = sorted(set(facts.kv_quant_modes) - set(PROVEN_KV_QUANT_MODES))
    return f"KV quantisation {', '.join(bad)}: scales are not proven" if bad else None


def _bad_layout(facts: EngineFacts) -> str | None:
    if facts.kv_cache_layout in PROVEN_KV_LAYOUTS:
        return None
    proven = ", ".join(str(layout) for layout in PROVEN_KV_LAYOUTS)
    return f"KV layout {facts.kv_cache_layout}; proven: {proven}"


def _bad_groups(facts: EngineFacts) -> str | None:
    kinds = frozenset(facts.group_kinds)
    if not kinds:
        return "no KV-cache group is known"
    if bad := sorted(kinds - set(PROVEN_GROUP_KINDS)):
        return f"KV-cache groups of kind {', '.join(bad)}"
    if len(kinds) > 1 and kinds not in PROVEN_GROUP_MIXES:
        return f"groups of several kinds in one model: {', '.join(sorted(kinds))}"
    return None


def _bad_hash(facts: EngineFacts) -> str | None:
    if facts.hash_algo in PROVEN_HASH_ALGOS:
        return None
    return f"block hash {facts.hash_algo}: other tokens can be made to have the same hash"


def _random_seed(facts: EngineFacts) -> str | None:
    return "the hash of the empty prefix is random per process" if facts.none_hash_random else None


def _no_prefix_caching(facts: EngineFacts) -> str | None:
    return None if facts.prefix_caching else "prefix caching is off: nothing will be offloaded"


def _spec_decode(facts: EngineFacts) -> str | None:
    return "speculative decoding is on: its KV blocks are not proven" if facts.spec_decode else None


def _bad_platform(facts: EngineFacts) -> str | None:
    return None if facts.platform in PROVEN_PLATFORMS else f"platform {facts.platform} is untested"


_ENGINE_RULES: Final[tuple[_Rule, ...]] = (
    _Rule("vllm_version", _bad_version, "install a tested version", "allow_untested_vllm"),
    _Rule("nnodes", _bad_nodes, "use one node with the mp executor", "allow_multi_node"),
    _Rule("kv_cache_dtype", _bad_dtype, "set --kv-cache-dtype auto", "allow_unproven_kv_dtype"),
    _Rule("kv_quant_modes", _bad_quant, "set --kv-cache-dtype auto", "allow_unproven_kv_dtype"),
    _Rule("kv_cache_layout", _bad_layout, "choose a proven layout", "allow_unproven_kv_layout"),
    _Rule("group_kinds", _bad_groups, "run this model without offload", "allow_unproven_groups"),
    _Rule("hash_algo", _bad_hash, "set --prefix-caching-hash-algo sha256", "allow_weak_block_hash"),
    _Rule(
        "none_hash_random",
        _random_seed,
        "use sha256, or set PYTHONHASHSEED to one value everywhere",
        "allow_weak_block_hash",
    ),
    _Rule("spec_decode", _spec_decode, "switch it off", "allow_unproven_spec_decode"),
    _Rule("prefix_caching", _no_prefix_caching, "switch it on", None, "warn"),
    _Rule("platform", _bad_platform, "run the conformance suite on it", None, "warn"),
)


def check_engine(facts: EngineFacts, config: KVSafeConfig) -> tuple[Complaint, ...]:
    """Return what is not proven about this engine and not let through by an override."""
    return tuple(
        complaint for complaint in _complaints(facts) if not _let_through(complaint, config)
    )


def refuse_unsafe(facts: EngineFacts, config: KVSafeConfig) -> tuple[Complaint, ...]:
    """Raise `ConfigError` for every complaint that stops the start; return the others.

    The returned ones (warnings, and what an override lets through) are for the log.
    """
    fatal = [c for c in check_engine(facts, config) if c.level == "refuse"]
    if fatal:
        raise ConfigError("kvsafe refuses this engine:", map(_as_problem, fatal))
    return _complaints(facts)


def _complaints(facts: EngineFacts) -> tuple[Complaint, ...]:
    found = ((rule, rule.problem(facts)) for rule in _ENGINE_RULES)
    return tuple(
        Complaint(rule.key, problem, rule.way_out, rule.override, rule.level)
        for rule, problem in found
        if problem is not None
    )


def _let_through(complaint: Complaint, config: KVSafeConfig) -> bool:
    return complaint.override in config.active_overrides


def _as_problem(complaint: Complaint) -> Problem:
    hint = f"or set {complaint.override} to true" if complaint.override else ""
    return Problem(complaint.key, complaint.problem, complaint.way_out, hint)


# --- the same tables as a page ----------------------------------------------------------------


def options_markdown() -> str:
    """Render every option as markdown, from the tables that check them (spec/configuration.md)."""
    defaults = {f.name: f.default for f in msgspec.structs.fields(KVSafeConfig)}
    groups = (
        ("Read by vLLM's own classes", "vllm"),
        ("Read by kvsafe", "kvsafe"),
        ("Overrides: each gives up something that was proven", "override"),
    )
    parts = [
        "# Configuration",
        "",
        "The keys of `kv_connector_extra_config`. Generated: do not edit.",
    ]
    for title, origin in groups:
        table = {name: o for name, o in OPTIONS.items() if o.origin == origin}
        parts += ["", f"## {title}", "", *_rows(table, defaults)]
    parts += ["", "## A secondary tier of type `fs`", "", *_rows(FS_TIER, {})]
    unproven = ", ".join(f"`{name}`" for name in UNPROVEN_TIER_TYPES)
    parts += [
        "",
        f"Other types ({unproven}, or a class with `module_path`) take the options of their",
    ]
    parts += ["class, unchecked, and need `allow_unproven_tier`."]
    parts += ["", "## Backpressure", "", *_rows(BACKPRESSURE, {})]
    parts += ["", "## What refuses to start, or warns", "", *_rule_rows()]
    return "\n".join(parts) + "\n"


def _rows(table: Mapping[str, Option], defaults: Mapping[str, object]) -> list[str]:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, option in table.items():
        default = option.default or _default_text(option, defaults.get(name))
        rows.append(f"| `{name}` | {option.kind} | {default} | {_cell(option.doc)} |")
    return rows


def _default_text(option: Option, default: object) -> str:
    if option.required:
        return "required"
    if default is None or default is msgspec.NODEFAULT:
        return "unset"
    if default == ():
        return "`[]`"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _rule_rows() -> list[str]:
    rows = ["| fact | way out | override |", "|---|---|---|"]
    for rule in _ENGINE_RULES:
        override = f"`{rule.override}`" if rule.override else "(a warning only)"
        rows.append(f"| `{rule.key}` | {_cell(rule.way_out)} | {override} |")
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _main(arguments: Sequence[str]) -> int:
    if list(arguments) != ["--markdown"]:
        sys.stderr.write("usage: python -m kvsafe.engine.config --markdown\n")
        return 2
    sys.stdout.write(options_markdown())
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
