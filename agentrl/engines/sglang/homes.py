"""Which server a conversation is on: its radix cache knows what was said."""

from collections import OrderedDict
from collections.abc import Sequence

from agentrl.engines.sglang.member import Member

MAX_HOMES = 1 << 16
"""Conversations whose server is remembered; those not heard of for longest are forgotten."""


class Homes:
    """The servers of conversations."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, Member] = OrderedDict()

    def choose(
        self, request_id: str, members: Sequence[Member], *, avoid: Sequence[Member] = ()
    ) -> Member | None:
        """Choose the server that knows the conversation, else the least loaded.

        Args:
            request_id: The conversation's.
            members: Of which those that are in are asked.
            avoid: Taken only where nobody else is in.

        Returns:
            None where nobody is in.
        """
        home = self._found.pop(request_id, None)
        if home is None or not home.is_in or home in avoid:
            able = [member for member in members if member.is_in]
            if not able:
                return None
            home = min(able, key=lambda m: (m in avoid, len(m.calls), m.num_homes))
            home.num_homes += 1
        self._found[request_id] = home
        if len(self._found) > MAX_HOMES:
            self._found.popitem(last=False)
        return home
