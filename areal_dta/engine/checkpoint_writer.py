"""Write the shards of a Megatron checkpoint in this process.

Megatron's own writer starts a manager process with ``spawn``, which imports the trainer's main module a second time
(seconds, half a gigabyte), forks a writer for every file out of a process with communication threads, and waits for
it without a time-out.
"""

from __future__ import annotations

import queue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_finalize
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

__all__ = ["InProcessSave"]


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's ``torch_dist`` format and planning; bytes are written synchronously, one flushed file per rank."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        filesystem_async._results_queue = queue.Queue()  # instead of a manager process's

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, save_state_dict_ret: Any) -> AsyncRequest:
        def write() -> None:
            results: dict[int, Any] = {}
            failure: Exception | None = None
            buckets = FileSystemWriterAsync.preload_tensors(writer.write_buckets, non_blocking=False)
            for index, bucket in enumerate(buckets):
                done: queue.Queue[tuple[int, Any]] = queue.Queue()
                pending: queue.Queue[int] = queue.Queue()
                pending.put(index)
                FileSystemWriterAsync.write_preloaded_data(
                    [writer.transforms], index, bucket, done, pending, use_fsync=True
                )
                outcome = done.get_nowait()[1]
                if isinstance(outcome, Exception):
                    failure = outcome  # reported to all ranks by the finalisation
                    break
                results[index] = outcome
            if writer.results_queue is not None:
                writer.results_queue.put(failure or results)

        def finalize() -> None:
            save_state_dict_async_finalize(*save_state_dict_ret)

        return AsyncRequest(write, (), [finalize])
