"""An engine on several machines: its workers are actors of a Ray cluster.

1. Join the cluster, or start one on this machine, and give it this package.
2. On every machine as many actors as it has room for, each holding a `worker.Worker`: one per GPU
   (or `gpus_per_worker` of them) where the cluster has any, else one per CPU core (or `threads` of
   them).
3. An actor has at most one batch at a time. One that has died is replaced where there is room, and
   machines that join during the sweep get actors, too.

Batches come back to the sweep, which alone writes, so that no other machine needs the run's folder.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from tqdm import tqdm

from lapa2_interp._util.parsing import whole_number
from lapa2_interp._util.values import Count, numbers_checked
from lapa2_interp.errors import RunError, parameter, unknown_choice
from lapa2_interp.generation.cell import Cell
from lapa2_interp.models.machine import ISA_VARIABLES, n_cores, slow_dtype_note
from lapa2_interp.models.prepacked import Prepacking
from lapa2_interp.runs.engines import Engine, Outcome, Slot, free_slot
from lapa2_interp.runs.manifest import library_versions, source_commit
from lapa2_interp.runs.store import FinishedBatch
from lapa2_interp.runs.worker import Worker

SETTINGS = ("HF_HUB_OFFLINE", "LAPA2_CACHE", "OMP_NUM_THREADS", *ISA_VARIABLES)
"""Environment variables the workers get from the coordinator: how they load models, and how they
compute."""
PACKAGE = Path(__file__).parents[1]
PATIENCE = 600.0
"""Seconds to wait for a cluster that has no room for any worker."""
ANSWER = 20.0
"""Seconds in which a cluster must answer, and its head must be back. After a minute without it Ray
ends the process, without a word on how to go on."""
JOIN = (
    "import logging, sys, ray; ray.init(address=sys.argv[1], logging_level=logging.CRITICAL,"
    " log_to_driver=False)"
)


class RemoteWorker(Worker):
    """A worker in an actor.

    Args:
        folder: The sweep's working folder, for relative paths in cells; a machine that does not
            have it keeps its own.
        commit: Commit of the source, which is shipped without its repository.
    """

    def __init__(
        self, device: str, threads: int, pack: str, attn: str, folder: str, commit: str | None
    ) -> None:
        super().__init__(device, threads, pack, max(1, n_cores() // threads), attn)
        self.commit = commit
        with suppress(OSError):
            os.chdir(folder)

    def place(self) -> tuple[str, dict[str, str], str | None]:
        """The machine's name, its versions of the libraries that compute, and a note if bfloat16
        is slow there."""
        note = slow_dtype_note("bfloat16", self.device)
        return socket.gethostname(), library_versions(), note

    def remote_batch(self, cell: Cell, number: int, prepacking: Prepacking | None) -> Outcome:
        """`try_batch`, with the commit of the sweep's source."""
        made = self.try_batch(cell, number, prepacking)
        if isinstance(made, FinishedBatch):
            record = made.record.model_copy(update={"commit": self.commit})
            return replace(made, record=record)
        return made


class RayPool(Engine):
    """An engine on the machines of a Ray cluster.

    Args:
        workers: By default as many as there is room for, and more when machines join.
        device: cpu, cuda, or auto: a model over all GPUs of its worker, which is the default where
            a worker has several.
        threads: CPU threads of a worker.
        address: HOST:PORT of a cluster's head, or auto: the cluster this machine belongs to. By
            default one is started here.
        gpus_per_worker: GPUs of a worker where the cluster has any, by default 1; a share of one
            below 1.
        pack: As in `load_model`; machines are taken to be full of workers.
        attn: As in `load_model`.

    Raises:
        RunError: Ray is not installed, the cluster is not reached, or has no room for a worker.
    """

    @numbers_checked
    def __init__(
        self,
        workers: Count | None = None,
        device: str | None = None,
        threads: int = 1,
        address: str | None = None,
        gpus_per_worker: float | None = None,
        pack: str = "auto",
        attn: str = "auto",
    ) -> None:
        if device not in (None, "cpu", "cuda", "auto"):
            raise RunError(
                f"{unknown_choice('device', device, ('cpu', 'cuda', 'auto'))}; a Ray worker sees"
                " its own GPUs only"
            )
        gpus = 1.0 if gpus_per_worker is None else gpus_per_worker
        if gpus <= 0 or (gpus > 1 and gpus % 1):
            raise RunError(
                f"{parameter('gpus_per_worker')} must be 1, 2, ... or a share of one such as"
                f" 0.5, found {gpus}"
            )
        self._ray = _join(address)
        here = self._ray.get_runtime_context()
        self._home, self._head = here.get_node_id(), here.gcs_address
        self._workers = workers
        self._slots: list[Slot] = []
        self._starting: dict[Any, Any] = {}  # an actor by the reference to its answer
        self._noted: set[str] = set()
        try:
            on_gpus = device != "cpu" and any(node.get("GPU") for node in self._nodes())
            self._kind = "GPU" if on_gpus else "CPU"
            self._each = gpus if on_gpus else float(threads)
            self._check(device, f"the Ray cluster at {address}" if address else "this machine")
            self.n_workers = workers or self._room()
            if on_gpus:
                device = device or ("auto" if gpus > 1 else "cuda")
                needs = {"num_cpus": 0, "num_gpus": int(gpus) if gpus >= 1 else gpus}
            else:
                device, needs = "cpu", {"num_cpus": threads}
            actor_class = self._ray.remote(RemoteWorker).options(**needs)
            settings = device, threads, pack, attn, str(Path.cwd()), source_commit()
            self._new = lambda: actor_class.remote(*settings)
        except BaseException:
            self._ray.shutdown()
            raise

    def _check(self, device: str | None, where: str) -> None:
        if device in ("cuda", "auto") and self._kind != "GPU":
            raise RunError(
                f"{where} has no GPU for device {device!r}; give {parameter('device', 'cpu')},"
                " or join a machine"
                " that has one"
            )
        if self._room() < 1:
            option = (
                f"{parameter('gpus_per_worker')}"
                if self._kind == "GPU"
                else f"{parameter('threads')}"
            )
            most = max((node.get(self._kind, 0) for node in self._nodes()), default=0)
            raise RunError(
                f"no machine of {where} has room for a worker, which needs {self._each:g}"
                f" {self._kind} where the largest has {most:g}; give a smaller {option}, or join a"
                " larger machine with `ray start --address=...`"
            )

    def _nodes(self) -> list[dict[str, float]]:
        """The resources of each machine, in use or free."""
        alive = {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}
        if self._home not in alive:
            raise RunError(
                "Ray has ended on this machine (`ray stop`, or its process was killed); start it"
                " again, and the same command resumes where this one stopped"
            )
        return list(alive.values())

    def _room(self) -> int:
        """Workers the cluster has room for."""
        return sum(int(node.get(self._kind, 0) / self._each + 1e-9) for node in self._nodes())

    def close(self) -> None:
        actors = [slot.worker for slot in self._slots] + list(self._starting.values())
        for actor in actors if actors and self._answers() else ():
            with suppress(Exception):
                self._ray.kill(actor)
        self._slots, self._starting = [], {}
        self._ray.shutdown()

    def slots(self) -> int:
        """Actors that have started. Dead ones are removed, and actors are added where the cluster
        has room; waits while there is none."""
        began = monotonic()
        while True:
            self._await_head()
            for slot in [slot for slot in self._slots if slot.is_lost]:
                with suppress(Exception):
                    self._ray.kill(slot.worker)
                self._slots.remove(slot)
            room = self._workers or self._room()
            for _ in range(room - len(self._slots) - len(self._starting)):
                actor = self._new()
                self._starting[actor.place.remote()] = actor
            self._start(0 if self._slots else 5.0)
            if self._slots:
                return len(self._slots)
            if monotonic() - began > PATIENCE:
                raise RunError(
                    f"the cluster has had no room for a worker for {PATIENCE / 60:.0f} minutes;"
                    " `ray status` tells who has it, and the same command resumes where this one"
                    " stopped"
                )

    def _start(self, seconds: float) -> None:
        """Give slots to actors that have answered.

        Raises:
            RunError: An actor cannot start, or has other versions of libraries.
        """
        ready, _ = (
            self._ray.wait(list(self._starting), timeout=seconds) if self._starting else ([], [])
        )
        for reference in ready:
            actor = self._starting.pop(reference)
            try:
                machine, versions, slow = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                lost = isinstance(error, self._ray.exceptions.RayActorError)
                if lost and not getattr(error, "actor_init_failed", False):
                    continue  # its machine has gone
                raise RunError(_cannot_start(error)) from error
            here = _public(library_versions())
            for name, version in _public(versions).items():
                if version != here[name]:
                    raise RunError(
                        f"{machine} has {name} {version} and this machine {here[name]}, so texts"
                        " would depend on where they are made; install the same versions on all"
                        " machines (requirements.lock) and start Ray there again"
                    )
            self._slots.append(Slot(actor, note=f"on {machine} {slow}" if slow else ""))

    def submit(
        self, cell: Cell, number: int, prepacking: Prepacking | None, progress: tqdm
    ) -> Future[Outcome]:
        slot = free_slot(self._slots, cell)
        if slot.note and cell.dtype == "bfloat16" and slot.note not in self._noted:
            self._noted.add(slot.note)
            tqdm.write(f"note: {slot.note}", file=sys.stderr)
        future: Future[Outcome] = slot.worker.remote_batch.remote(cell, number, prepacking).future()
        slot.future, slot.cell = future, cell.key
        return future

    def _answers(self) -> bool:
        """True if the head of the cluster takes a connection."""
        try:
            _connect(self._head)
        except OSError:
            return False
        return True

    def _await_head(self) -> None:
        last = monotonic() + ANSWER
        while not self._answers():
            if monotonic() > last:
                raise RunError(
                    f"the head of the Ray cluster at {self._head} has not answered for"
                    f" {ANSWER:g} s; start it again with `ray start --head`, and the same command"
                    " resumes where this one stopped"
                )
            sleep(1)


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


def _public(versions: dict[str, str]) -> dict[str, str]:
    """Versions without marks of the build, such as +cu130."""
    return {name: version.partition("+")[0] for name, version in versions.items()}


def _cannot_start(error: Exception) -> str:
    reason = next(
        (line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__
    ).strip()
    return (
        f"a worker cannot start on the cluster: {reason.rstrip('.')}; every machine needs"
        " lapa2-interp[ray] with what it depends on, in the environment `ray start` was run in,"
        " and RAY_AUTH_MODE set (or not) as here"
    )


def _join(address: str | None) -> Any:
    """Ray, connected to the cluster at this address or to one of its own."""
    # Read when Ray is imported, or by the processes it starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise RunError(
            f"{parameter('engine', 'ray')} needs Ray, which is not installed; pip install"
            " 'lapa2-interp[ray]', or"
            f" use {parameter('engine', 'local')}"
        ) from error
    environment = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    settings: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
        "runtime_env": {"py_modules": [str(PACKAGE)], "env_vars": environment},
    }
    if address is not None:
        _reach(address)
        settings["address"] = address
    else:
        settings |= {"address": "local", "num_cpus": n_cores(), "include_dashboard": False}
    try:
        ray.init(**settings)
    except Exception as error:
        raise RunError(_not_joined(address or "local", str(error))) from error
    return ray


def _reach(address: str) -> None:
    """Check that a cluster can be joined.

    This is tried in another process: Ray waits for minutes, then ends the process it is in.

    Raises:
        RunError: It cannot be joined.
    """
    host, mark, port = address.rpartition(":")
    if address != "auto":
        if not (host and mark and whole_number(port) is not None) or "/" in host:
            raise RunError(
                f"{parameter('address')} {address!r} is not one; allowed: HOST:PORT of the"
                " cluster's head, auto"
            )
        try:
            _connect(address)
        except (OSError, OverflowError) as error:
            raise RunError(_not_joined(address, str(error))) from error
    environment = os.environ | {
        "RAY_gcs_server_request_timeout_seconds": "10",
        "RAY_NUM_REDIS_GET_RETRIES": "3",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", JOIN, address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=ANSWER,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(_not_joined(address, f"no answer in {ANSWER:g} s")) from error
    if done.returncode:
        raise RunError(_not_joined(address, done.stderr))


def _not_joined(address: str, reason: str) -> str:
    if "AuthenticationError" in reason:
        return (
            f"the Ray cluster at {address} asks for its token, which is missing here or another;"
            " copy ~/.ray/auth_token from its head to every machine and `export"
            " RAY_AUTH_MODE=token` there"
        )
    last = re.split(r"^(?=[\w.]*(?:Error|Exception)\b)", reason, flags=re.MULTILINE)[-1]
    return (
        f"cannot join the Ray cluster at {address}"
        f" ({' '.join(last.split())[:300].rstrip('.') or 'no reason given'}); allowed: HOST:PORT of"
        " the cluster's head, or auto on a machine that belongs to it. `ray start --head` begins"
        " one, `ray start --address=HOST:PORT` makes this machine part of it, and without"
        f" {parameter('address')} one is started here"
    )
