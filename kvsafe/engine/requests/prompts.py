# SPDX-License-Identifier: Apache-2.0
"""What a tier may know of a request beyond its keys: its tokens, and what else decides its KV.

Peers that are not kvsafe know a chunk by the tokens up to its end. A tier for them asks the
request's context for its `Prompt`; the scheduler half has put it there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import ReqContext


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request, seen through vLLM's own object: tokens that are generated appear in it."""

    request: Any

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens so far."""
        tokens: Sequence[int] = self.request.all_token_ids
        return tokens

    @property
    def prompt_tokens(self) -> int:
        """How many of them are the prompt."""
        return int(self.request.num_prompt_tokens)

    @property
    def salt(self) -> str:
        """The cache salt, empty for none."""
        return str(self.request.cache_salt or "")

    @property
    def only_tokens(self) -> bool:
        """Whether nothing but tokens and the salt decides its KV, and tokens only ever grow.

        So it has no adapter, no image, no embedding, and is no session that takes tokens back.
        """
        request = self.request
        return (
            request.lora_request is None
            and not request.mm_features
            and request.prompt_embeds is None
            and not request.resumable
        )


def attach_prompt(context: ReqContext, request: Any) -> None:
    """Leave a request's prompt where tiers find it."""
    context.set_state(Prompt(request))


def prompt_of(context: ReqContext) -> Prompt | None:
    """The prompt of a request, None where nobody left it."""
    found: Prompt | None = context.get_state(Prompt)
    return found
