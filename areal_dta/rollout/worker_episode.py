"""One episode inside AReaL's executor, and the workflow it runs.

AReaL's executor logs an exception of a workflow and returns None for it, so the cause is lost. `Episode` stands
between them: it is itself a `RolloutWorkflow`, runs the user's workflow under a time-out, and reports exactly one
`Outcome` with the cause.
"""

from __future__ import annotations

import areal_dta.areal_env  # noqa: F401

# isort: split
import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from areal.api import RolloutWorkflow

from areal_dta.records import Lease, Trajectory
from areal_dta.rollout.worker_convert import Limits, Rejected, to_trajectory
from areal_dta.rollout.worker_engine import EpisodeEngine

__all__ = ["Episode", "Outcome", "episode_data"]

log = logging.getLogger(__name__)

_DETAIL_CHARS = 2000


@dataclass(frozen=True)
class Outcome:
    """How an episode ended: with a trajectory, or with a cause (`worker_convert.CAUSES`) and a detail for people."""

    lease: Lease
    trajectory: Trajectory | None
    cause: str | None
    detail: str
    duration_s: float
    num_turns: int
    num_tokens: int


def episode_data(lease: Lease) -> dict[str, Any]:
    """What the workflow gets as ``data``: the dataset line, plus the lease's facts under underscored names."""
    return {
        **lease.item,
        "_seed": lease.seed,
        "_greedy": lease.eval_tag is not None,
        "_group_id": lease.group_id,
        "_sample": lease.sample,
    }


class Episode(RolloutWorkflow):
    """Runs ``inner`` for one lease.

    ``report`` is called once, on the executor's thread. `cancel` may be called from any thread. ``timeout_s`` counts
    from the start of the episode, not from its submission.
    """

    def __init__(
        self,
        inner: RolloutWorkflow,
        lease: Lease,
        report: Callable[[Outcome], None],
        *,
        timeout_s: float,
        limits: Limits,
        worker: str,
    ) -> None:
        self.inner, self.lease = inner, lease
        self.submitted_s = time.monotonic()
        self.started_s: float | None = None
        self._report, self._timeout_s, self._limits, self._worker = report, timeout_s, limits, worker
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled: str | None = None
        self._bound: EpisodeEngine | None = None

    @property
    def num_row_tokens(self) -> int:
        """Tokens of its completions so far, each with its prompt: the length of what is lost if it fails."""
        return self._bound.num_row_tokens if self._bound else 0

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """AReaL's entry point; returns the workflow's own result so that the executor's bookkeeping is right."""
        with self._lock:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            self.started_s = time.monotonic()
        bound = self._bound = EpisodeEngine(engine, self.lease)
        try:
            return await self._guarded(bound, data)
        finally:
            bound.close("finished")
            with self._lock:
                self._loop = self._task = None

    def cancel(self, why: str) -> None:
        """End the episode as ``aborted``; without effect once it has ended."""
        with self._lock:
            self._cancelled = why
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def _guarded(self, bound: EpisodeEngine, data: dict[str, Any]) -> Any:
        timer = asyncio.timeout(self._timeout_s)
        try:
            if self._cancelled is not None:
                raise Rejected("aborted", self._cancelled)
            async with timer:
                result = await self.inner.arun_episode(bound, data)
            trajectory = to_trajectory(result, self.lease, self._limits, self._worker, self._stats(bound))
        except asyncio.CancelledError:
            bound.close("cancelled")
            self._end(bound, None, "aborted", self._cancelled or "the executor stopped")
            if self._cancelled is None:
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            return None
        except TimeoutError as error:
            bound.close("timed out")
            if timer.expired():
                self._end(bound, None, "timeout", f"no result within {self._timeout_s:g} s")
            else:
                self._end(bound, None, "raised", _describe(error))
            return None
        except Rejected as rejected:
            self._end(bound, None, rejected.cause, rejected.detail)
            return None
        except (
            Exception
        ) as error:  # the boundary of the user's code: the cause travels to the batcher, the worker lives on
            log.exception("workflow failed in episode %s", self.lease.lease_id)
            self._end(bound, None, "raised", _describe(error))
            return None
        self._end(bound, trajectory, None, "")
        return result

    def _elapsed_s(self) -> float:
        return time.monotonic() - (self.started_s or self.submitted_s)

    def _stats(self, bound: EpisodeEngine) -> dict[str, float]:
        return {
            "episode_s": self._elapsed_s(),
            "turns": float(bound.num_generations),
            "output_tokens": float(bound.num_output_tokens),
        }

    def _end(self, bound: EpisodeEngine, trajectory: Trajectory | None, cause: str | None, detail: str) -> None:
        turns, tokens = bound.num_generations, bound.num_output_tokens
        self._report(Outcome(self.lease, trajectory, cause, detail[:_DETAIL_CHARS], self._elapsed_s(), turns, tokens))


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    cause = error.__cause__
    return text if cause is None else f"{text} (from {type(cause).__name__}: {cause})"
