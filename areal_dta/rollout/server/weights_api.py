"""Endpoints that change the weights: from a folder, or over a process group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from areal_dta.metrics import Publisher
from areal_dta.nn import WeightsMismatch
from areal_dta.nn.loading import expected_shapes
from areal_dta.rollout.server.engine import RUNNING_MODES, Update
from areal_dta.rollout.server.errors import ApiError
from areal_dta.rollout.server.fields import check_fields, integer, number, typed
from areal_dta.rollout.server.front import Front
from areal_dta.rollout.server.http import json_response, read_json
from areal_dta.rollout.server.weight_group import DTYPES, GroupSpec, Staging, TensorSpec, UpdateRefused, WeightGroup
from areal_dta.weights import TornWeights, folder_digest, read_manifest

__all__ = ["WeightsApi"]

log = logging.getLogger(__name__)
REFUSALS = (TornWeights, WeightsMismatch, ValueError, OSError)
_DISK_FIELDS = ("model_path", "weight_version", "abort_all_requests", "flush_cache", "running")
_GROUP_FIELDS = (
    "master_address", "master_port", "rank_offset", "world_size", "backend", "group_name", "timeout_s",
)  # fmt: skip
_RECEIVE_FIELDS = (
    "names", "dtypes", "shapes", "group_name", "weight_version", "abort_all_requests", "flush_cache", "running",
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "load_format": (None, "auto", "safetensors"),
    "is_async": (None, False),
    "keep_pause": (None, True, False),
    "recapture_cuda_graph": (None, False),
    "token_step": (None, 0),
}


class WeightsApi:
    """One update at a time; whatever is refused leaves the old version serving."""

    def __init__(self, front: Front, model_path: Path, publisher: Publisher) -> None:
        self.model_path = model_path
        manifest = read_manifest(model_path)  # verified when the model was loaded
        self.digest = manifest.digest if manifest else None  # of the folder that serves; None: unknown, or no folder
        self._front = front
        self._engine = front.engine
        self._publisher = publisher
        self._lock = asyncio.Lock()
        self._groups: dict[str, WeightGroup] = {}
        self._staging = Staging()
        self._on_groups: set[asyncio.Task[web.Response]] = set()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        for path, handler in (
            ("/update_weights_from_disk", self.from_disk),
            ("/init_weights_update_group", self.init_group),
            ("/destroy_weights_update_group", self.destroy_group),
            ("/update_weights_from_distributed", self.from_group),
            ("/begin_weight_update", self.begin),
            ("/end_weight_update", self.end),
        ):
            router.add_post(path, handler)

    async def close(self) -> None:
        for task in self._on_groups:
            task.cancel()
        for group in self._groups.values():
            await asyncio.to_thread(group.close)
        self._groups.clear()

    async def from_disk(self, request: web.Request) -> web.Response:
        """Read and verify on a helper thread while generation goes on, then swap between two steps."""
        body = await read_json(request)
        check_fields(body, _DISK_FIELDS, _NEUTRAL, "body")
        path, version, running = body.get("model_path"), _version(body), _running(body)
        if not isinstance(path, str) or not path:
            raise ApiError(f"model_path must be a folder, got {path!r:.80}")
        folder = Path(path)
        async with self._lock:
            if self._staging.explicit:
                raise ApiError("an update is under way; call /end_weight_update first", 400, "busy")
            try:
                with self._publisher.span("time/server_update"):
                    update = await asyncio.to_thread(self._engine.read_update, folder, version)
                    digest = await asyncio.to_thread(_digest, folder)
                    count = await self._swap(update, running)
            except REFUSALS as error:
                return self._refused(f"weights {path}", error)
            self.model_path, self.digest = folder, digest
        return _done("Weights updated.", update.version, count)

    async def init_group(self, request: web.Request) -> web.Response:
        """Join the sender's process group; the answer comes when all its ranks have met."""
        body = await read_json(request)
        check_fields(body, _GROUP_FIELDS, {"pp_rank": (None, 0)}, "body")
        return await self._to_the_end(self._join(_group_spec(body, self._engine.device.type)))

    async def _join(self, spec: GroupSpec) -> web.Response:
        async with self._lock:
            if spec.name in self._groups:
                raise ApiError(f"group_name={spec.name!r} exists already; call /destroy_weights_update_group first")
            try:
                self._groups[spec.name] = await asyncio.to_thread(WeightGroup, spec)
            except UpdateRefused as error:
                return json_response({"success": False, "message": str(error)}, 400)
        return json_response({"success": True, "message": f"Rank {spec.rank_offset} of {spec.world_size} joined."})

    async def destroy_group(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        check_fields(body, ("group_name",), {}, "body")
        async with self._lock:
            group = self._group(body)
            del self._groups[group.spec.name]
            await asyncio.to_thread(group.close)
        return json_response({"success": True, "message": f"Group {group.spec.name!r} left."})

    async def begin(self, request: web.Request) -> web.Response:
        """Open an update: what comes until its end is swapped in together or not at all."""
        body = await read_json(request, allow_empty=True)
        check_fields(body, ("selector",), {}, "body")
        selector = body.get("selector") or "all"
        if selector not in ("target", "all"):
            raise ApiError(f"selector={selector!r:.60} is not available; this server has a target model only")
        async with self._lock:
            dropped = self._staging.reset(explicit=True)
        remark = f" An unfinished update of {dropped} tensors was dropped." if dropped else ""
        return json_response({"success": True, "message": f"Update begun.{remark}"})

    async def end(self, request: web.Request) -> web.Response:
        body = await read_json(request, allow_empty=True)
        check_fields(body, ("weight_version", "running", "abort_all_requests"), {}, "body")
        version, running = _version(body), _running(body)
        async with self._lock:
            if not self._staging.explicit:
                raise ApiError("no update is under way; call /begin_weight_update first")
            self._staging.version = version or self._staging.version
            return await self._apply(running)

    async def from_group(self, request: web.Request) -> web.Response:
        """Receive the announced tensors. Inside begin and end they are staged; otherwise they take effect when the
        model is complete, in one call or over several."""
        body = await read_json(request)
        check_fields(body, _RECEIVE_FIELDS, _NEUTRAL, "body")
        specs, version, running = _tensor_specs(body), _version(body), _running(body)
        return await self._to_the_end(self._receive(body, specs, version, running))

    async def _receive(
        self, body: Mapping[str, Any], specs: list[TensorSpec], version: str | None, running: str
    ) -> web.Response:
        async with self._lock:
            group = self._group(body)
            shapes = expected_shapes(self._engine.config)
            self._check_size(specs, shapes)
            try:
                # Received even when it will be refused: the sender would hang in its broadcast otherwise.
                new = await asyncio.to_thread(group.receive, specs, self._engine.device)
            except UpdateRefused as error:
                self._staging.reset()
                del self._groups[group.spec.name]  # a group whose peer broke off cannot be used again
                await asyncio.to_thread(group.close)
                return self._refused("weights over the group", error)
            try:
                dropped = self._staging.add(new, version)
                for spec in specs:
                    self._check_spec(spec, shapes)
            except UpdateRefused as error:
                return self._refused("weights over the group", error)
            if self._staging.explicit or self._staging.missing(shapes):
                message = f"{len(self._staging.tensors)} of {len(shapes)} tensors received."
                if dropped:
                    message += f" An unfinished update of {dropped} tensors was dropped."
                return json_response({"success": True, "message": message, "num_paused_requests": 0})
            return await self._apply(running)

    async def _to_the_end(self, work: Coroutine[Any, Any, web.Response]) -> web.Response:
        """Also when the caller hangs up: the helper thread goes on with the group, and the next one has to wait."""
        task = asyncio.create_task(work)
        self._on_groups.add(task)
        task.add_done_callback(self._on_groups.discard)
        return await asyncio.shield(task)

    async def _apply(self, running: str) -> web.Response:
        staging = self._staging
        try:
            if staging.problem is not None:
                raise UpdateRefused(staging.problem)
            with self._publisher.span("time/server_update"):
                version = await asyncio.to_thread(staging.version_or_digest)
                update = await asyncio.to_thread(self._engine.make_update, staging.tensors, version)
                count = await self._swap(update, running)
                self.digest = None
        except REFUSALS as error:
            return self._refused("weights over the group", error)
        finally:
            staging.reset()
        return _done("Weights updated.", update.version, count)

    def _check_spec(self, spec: TensorSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if spec.name in shapes and shapes[spec.name] != spec.shape:
            self._staging.refuse(f"{spec.name} has shape {spec.shape}, the config asks for {shapes[spec.name]}")
        if spec.name not in shapes and not self._ignorable(spec.name):
            self._staging.refuse(f"tensor names differ from the config: unknown {spec.name!r}")

    async def _swap(self, update: Update, running: str) -> int:
        return await self._front.on_model_thread(self._engine.apply_update(update, running), "the weight swap")

    def _refused(self, what: str, error: Exception) -> web.Response:
        log.warning("%s refused: %s", what, error)
        message = f"refused, version {self._engine.version} keeps serving: {error}"
        return json_response({"success": False, "message": message, "num_paused_requests": 0}, 400)

    def _ignorable(self, name: str) -> bool:
        """Tensors that a folder may hold too without being used."""
        return name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and self._engine.config.tied_embeddings
        )

    def _check_size(self, specs: list[TensorSpec], shapes: Mapping[str, tuple[int, ...]]) -> None:
        announced = sum(s.num_bytes for s in specs)
        limit = 3 * sum(TensorSpec(n, self._engine.dtype, s).num_bytes for n, s in shapes.items()) + (1 << 20)
        if announced > max(limit, limit * 8 // self._engine.dtype.itemsize):
            raise ApiError(f"shapes announce {announced} bytes, far more than the model has; nothing was received", 413)

    def _group(self, body: Mapping[str, Any]) -> WeightGroup:
        name = body.get("group_name", "weight_update_group")
        if name not in self._groups:
            raise ApiError(f"group_name={name!r:.80} is not known; call /init_weights_update_group first")
        return self._groups[name]


def _done(message: str, version: str, count: int) -> web.Response:
    return json_response({"success": True, "message": message, "num_paused_requests": count, "weight_version": version})


def _digest(folder: Path) -> str:
    """Of a folder that has just been read and, with a manifest, verified."""
    manifest = read_manifest(folder)
    return manifest.digest if manifest else folder_digest(folder)


def _version(body: Mapping[str, Any]) -> str | None:
    version = body.get("weight_version")
    if version is not None and (not isinstance(version, str) or not version):
        raise ApiError(f"weight_version must be a non-empty string, got {version!r:.60}")
    return version


def _running(body: Mapping[str, Any]) -> str:
    """What running requests do; SGLang's ``abort_all_requests`` is one of the three ways."""
    abort = bool(typed(body.get("abort_all_requests") or False, bool, "abort_all_requests"))
    running = body.get("running") or ("abort" if abort else "recompute")
    if running not in RUNNING_MODES or (abort and running != "abort"):
        raise ApiError(
            f"running={running!r:.60} is none of {', '.join(RUNNING_MODES)}, or contradicts abort_all_requests"
        )
    return str(running)


def _group_spec(body: Mapping[str, Any], device: str) -> GroupSpec:
    backend = body.get("backend") or "gloo"
    if backend != "gloo" and not (backend == "nccl" and device == "cuda"):
        raise ApiError(f"backend={backend!r:.40} is not available for weights on {device}; use gloo")
    port = body.get("master_port")
    if isinstance(port, str) and port.isdecimal():
        port = int(port)
    world_size = integer(body.get("world_size"), "world_size", 2, 1 << 16)
    return GroupSpec(
        name=typed(body.get("group_name", "weight_update_group"), str, "group_name"),
        master_address=typed(body.get("master_address"), str, "master_address"),
        master_port=integer(port, "master_port", 1, 65535),
        rank_offset=integer(body.get("rank_offset"), "rank_offset", 1, world_size - 1),
        world_size=world_size,
        backend=backend,
        timeout_s=number(body.get("timeout_s", 600.0), "timeout_s", 0.1, 86400.0),
    )


def _tensor_specs(body: Mapping[str, Any]) -> list[TensorSpec]:
    names, dtypes, shapes = (typed(body.get(key), list, key) for key in ("names", "dtypes", "shapes"))
    if not names or not len(names) == len(dtypes) == len(shapes):
        raise ApiError(f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes: send one of each per tensor")
    specs = []
    for i, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        found = DTYPES.get(str(dtype).removeprefix("torch."))
        if found is None:
            raise ApiError(f"dtypes[{i}]={dtype!r:.40} is none of {', '.join(DTYPES)}")
        sizes = tuple(integer(n, f"shapes[{i}]", 0, 1 << 40) for n in typed(shape, list, f"shapes[{i}]"))
        specs.append(TensorSpec(typed(name, str, f"names[{i}]"), found, sizes))
    if len({s.name for s in specs}) < len(specs):
        raise ApiError("names holds a tensor twice")
    return specs
