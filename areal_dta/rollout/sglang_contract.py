"""What servers of different kinds and versions can do, in one place: SGLang's releases and the embedded server.

Read off the sources of the releases named below. Router, start-up and contract tests ask here; nothing else compares
versions. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EMBEDDED", "PINNED", "Contract", "contract_of", "contract_of_info"]

PINNED = "0.5.10.post1"  # what AReaL 1.0.4 asks for
_OLDEST = (0, 5, 10)
_CHAT_TOKEN_IDS = (0, 5, 17)
_VERSION_SPANS = (0, 5, 19)
_UPDATE_SESSIONS = (0, 5, 21)
_FLUSH_UNDER_RETRACTED = (0, 5, 21)
_DISK_REACHES_DRAFTER = (0, 5, 11)
_PLUGINS = (0, 5, 21)
_REMOVED_FLAGS = {"--torchao-config": (0, 5, 18), "--cuda-graph-max-bs": (0, 5, 20), "--cuda-graph-bs": (0, 5, 20)}


@dataclass(frozen=True)
class Contract:
    """``version_spans``: answers say which tokens each weight version wrote (``meta_info.weight_versions``).

    ``chat_token_ids``: ``return_token_ids`` of chat requests. ``update_sessions``: group updates must stand between
    ``/begin_weight_update`` and ``/end_weight_update``; ``optional_sessions``: they may. ``flush_under_retracted``: an
    update may drop the old KV while retracted requests wait; without it such an update ends the server's scheduler.
    ``removed_flags``: keys of AReaL's ``sglang`` section that the release takes no more. ``disk_reaches_drafter``: an
    update of the policy from disk is loaded into a drafter as well. ``plugins``: takes our plugin, with which updates
    from disk go to the policy or to the drafter, and the tuner sets the number of drafting steps.
    """

    name: str
    version_spans: bool
    chat_token_ids: bool
    update_sessions: bool
    flush_under_retracted: bool
    optional_sessions: bool = False
    removed_flags: tuple[str, ...] = ()
    disk_reaches_drafter: bool = False
    plugins: bool = False

    @property
    def update_pause(self) -> str:
        """The mode of ``/pause_generation`` before an update that must not reuse old KV."""
        return "retract" if self.flush_under_retracted else "abort"

    def limits(self) -> list[str]:
        """What clients of this server have to do without, a sentence each."""
        found = []
        if not self.flush_under_retracted:
            found.append("weight updates answer running requests with what they have; clients send the rest again")
        if not self.version_spans:
            found.append("answers name one weight version for all their tokens")
        if not self.chat_token_ids:
            found.append("chat answers have no token ids (return_token_ids)")
        if self.update_sessions:
            found.append(
                "group updates need /begin_weight_update and /end_weight_update, which AReaL's client does not send; "
                "publish weights from disk"
            )
        return found


EMBEDDED = Contract("the embedded server", True, True, False, True, optional_sessions=True)


def contract_of(version: str) -> Contract:
    """The contract of an SGLang release such as ``0.5.10.post1``; what is no release number counts as the oldest."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(map(int, found.groups())) if found else _OLDEST
    return Contract(
        f"SGLang {version}",
        version_spans=number >= _VERSION_SPANS,
        chat_token_ids=number >= _CHAT_TOKEN_IDS,
        update_sessions=number >= _UPDATE_SESSIONS,
        flush_under_retracted=number >= _FLUSH_UNDER_RETRACTED,
        removed_flags=tuple(flag for flag, since in _REMOVED_FLAGS.items() if number >= since),
        disk_reaches_drafter=number >= _DISK_REACHES_DRAFTER,
        plugins=number >= _PLUGINS,
    )


def contract_of_info(info: Mapping[str, Any]) -> Contract:
    """From the answer of ``/server_info``: SGLang names its release there, the embedded server its instance."""
    if "instance" in info:
        return EMBEDDED
    return contract_of(str(info.get("version", "of unknown version")))
