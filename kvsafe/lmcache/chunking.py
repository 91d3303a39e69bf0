# SPDX-License-Identifier: Apache-2.0
"""Prompts into chunks as LMCache cuts them, each with the hash of everything up to its end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvsafe.lmcache.hashes import HashChain, Value

CHUNK_TOKENS = 256
"""LMCache's default."""


class Chunk(NamedTuple):
    """Tokens `start` to `end` (exclusive), and the hash of tokens 0 to `end`."""

    start: int
    end: int
    value: Value


def spans(tokens: int, chunk_tokens: int, *, unfull: bool = False) -> Iterator[tuple[int, int]]:
    """Where chunks begin and end; `unfull` adds the rest at the end as a shorter one."""
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens}")
    for start in range(0, tokens, chunk_tokens):
        end = min(start + chunk_tokens, tokens)
        if end - start == chunk_tokens or unfull:
            yield start, end


def chunks(
    chain: HashChain,
    tokens: Sequence[int],
    chunk_tokens: int = CHUNK_TOKENS,
    *,
    unfull: bool = False,
    skip: int = 0,
) -> Iterator[Chunk]:
    """The chunks of a prompt in order; those that begin before token `skip` are left out.

    Raises `ValueError` when `skip` is not where a chunk begins (LMCache raises as well).
    """
    if skip % chunk_tokens:
        raise ValueError(f"skip {skip} is no multiple of {chunk_tokens}")
    value = chain.none_hash
    for start, end in spans(len(tokens), chunk_tokens, unfull=unfull):
        value = chain.extend(value, tokens[start:end])
        if start >= skip:
            yield Chunk(start, end, value)


@dataclass(slots=True)
class PrefixHashes:
    """The hashes of one growing sequence of tokens: each full chunk is hashed once."""

    chain: HashChain
    chunk_tokens: int
    values: list[Value] = field(default_factory=list)

    def value(self, end: int, tokens: Sequence[int]) -> Value | None:
        """The hash of the chunk that ends at token `end`; None if no full chunk ends there."""
        count, rest = divmod(end, self.chunk_tokens)
        if rest or count < 1 or end > len(tokens):
            return None
        while len(self.values) < count:
            start = len(self.values) * self.chunk_tokens
            prefix = self.values[-1] if self.values else self.chain.none_hash
            part = tokens[start : start + self.chunk_tokens]
            self.values.append(self.chain.extend(prefix, part))
        return self.values[count - 1]
