"""The engine's thread, and the ranks that follow it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megafp8.inference import Generator, SamplingOptions
from megafp8.inference.generator import CacheOptions
from megafp8.inference.server import engine as module
from megafp8.inference.server.engine import Engine, Handle
from megafp8.inference.server.incoming_weights import NewWeights
from tests.inference.server.serving import write_model
from tests.world import World

CACHE = CacheOptions(page_size=4, cache_tokens=96, max_batch_tokens=8, max_sequences=3)
REQUESTS = [
    ([[1, 2, 3], [7]], SamplingOptions(max_tokens=6, temperature=1.0, seed=1, num_samples=2, ignore_end=True)),
    ([[4] * 20], SamplingOptions(max_tokens=12, seed=2, ignore_end=True)),
    ([[5, 6], [1, 2], [9]], SamplingOptions(max_tokens=5, temperature=0.7, top_p=0.9, seed=3, ignore_end=True)),
]
IDLE = 0.6


async def _tokens(engine: Engine, handle: Handle) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    while handle.texts or not handle.updates.empty():
        updates = await handle.updates.get()
        assert not isinstance(updates, Exception)
        for update in updates:
            found.setdefault((update.prompt, update.sample), []).append(update.token)
    return found


async def _refit(engine: Engine, folder: Path) -> list[int]:
    """Return the versions after a refit from a trainer that is silent, which is given up, and one from `folder`."""
    versions = []
    await engine.pause(hold=True)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refit = asyncio.create_task(engine.refit(NewWeights(trainer=f"127.0.0.1:{silent.getsockname()[1]}")))
        await asyncio.sleep(0.2)
        engine.resume()
        with pytest.raises(ValueError, match="the server was resumed before they had arrived"):
            await asyncio.wait_for(refit, 20)
        versions.append(engine.weight_version)
    await engine.pause(hold=True)
    await asyncio.wait_for(engine.refit(NewWeights(checkpoint=str(folder))), 20)
    engine.resume()
    return [*versions, engine.weight_version]


async def _serve(engine: Engine, folder: Path) -> list[Any]:
    """Texts of all requests, which come while others run and are cancelled; twice, with nothing to do between."""
    engine.start()
    assert await _refit(engine, folder) == [0, 1]
    found = []
    for _ in range(2):
        handles = []
        for prompts, options in REQUESTS:
            cancelled = engine.submit([[8, 8]], [SamplingOptions(max_tokens=60, seed=1, ignore_end=True)])
            await cancelled.updates.get()
            handles.append(engine.submit(prompts, [options] * len(prompts)))
            engine.cancel(cancelled)
            engine.cancel(cancelled)
        found.append([await _tokens(engine, handle) for handle in handles])
        await asyncio.sleep(IDLE)
    assert engine.open_texts == 0
    await asyncio.to_thread(engine.stop)
    return found


def _rank(folder: Path, layout: dict[str, int]) -> dict[str, Any]:
    module.HEARTBEAT = 0.2
    waits: list[tuple[float, float]] = []  # seconds, and those of them that a core was busy

    def timed(*arguments: Any) -> Any:
        start = time.monotonic(), time.process_time()
        command = share(*arguments)
        waits.append((time.monotonic() - start[0], time.process_time() - start[1]))
        return command

    share, module._share = module._share, timed
    generator = Generator.from_checkpoint(folder, device="cpu", cache=CACHE, **layout)
    alone = [generator.generate(prompts, options) for prompts, options in REQUESTS]
    requests = module._Requests(generator)
    added = module.Added(1, [[8]], [SamplingOptions(max_tokens=3, seed=1)])
    assert requests.step(module.Command([added], [1])) == {}, "cancelled before it began"
    assert generator.load == (0, 0, 0, 24)
    engine = Engine(generator)
    found: dict[str, Any] = {}
    if generator.model.parallel.world.is_first:
        found["served"] = asyncio.run(_serve(engine, folder))
        found["alone"] = [{(x.prompt, x.sample): x.tokens for x in completions} for completions in alone]
    else:
        engine.follow()
    return found | {"load": generator.load, "waits": [wait for wait in waits if wait[0] > 0.1]}


@pytest.mark.parametrize("layout", [{"tensor": 2}, pytest.param({"pipeline": 2}, marks=pytest.mark.slow)])
def test_ranks_follow_the_first(world2: World, tmp_path: Path, layout: dict[str, int]) -> None:
    """Texts are those of the generator alone, no page is lost on any rank, and a rank that waits uses no core."""
    first, second = world2.run(_rank, write_model(tmp_path), layout)
    assert first["served"] == [first["alone"]] * 2
    assert first["load"] == second["load"] == (0, 0, 0, 24)
    assert len(second["waits"]) >= 4, "no heartbeats"
    assert sum(busy for _, busy in second["waits"]) < 0.1 * sum(seconds for seconds, _ in second["waits"])


async def _pause_twice(engine: Engine, proceed: threading.Event) -> list[bool]:
    """Return whether the engine is paused after pauses of two clients, after `resume`, and after a lone client left."""
    paused = []

    async def two_pauses(leaving: int) -> None:
        handle = engine.submit([[5]], [SamplingOptions(max_tokens=5, seed=1, ignore_end=True)])
        await handle.updates.get()
        proceed.clear()
        pauses = [asyncio.create_task(engine.pause(hold=False)) for _ in range(2)]
        await asyncio.sleep(0.05)
        for pause in pauses[:leaving]:
            pause.cancel()
        proceed.set()
        await asyncio.wait_for(asyncio.gather(*pauses, return_exceptions=True), 20)
        while handle.texts:
            await asyncio.wait_for(handle.updates.get(), 20)
        paused.append(engine.paused)

    engine.start()
    for leaving in range(3):
        await two_pauses(leaving)
        if engine.paused:
            await asyncio.wait_for(engine.pause(hold=True), 20)
            engine.resume()
        paused.append(engine.paused)
    await asyncio.to_thread(engine.stop)
    return paused


def test_two_clients_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both wait for one pause, which lasts if the first one leaves; it is given up if both leave before it begins."""
    generator = Generator.from_checkpoint(write_model(tmp_path), device="cpu", cache=CACHE)
    proceed, step = threading.Event(), generator.step
    proceed.set()
    monkeypatch.setattr(generator, "step", lambda: (proceed.wait(), step()))
    engine = Engine(generator)
    assert asyncio.run(_pause_twice(engine, proceed)) == [True, False, True, False, False, False]


def _first_dies(folder: Path) -> str:
    generator = Generator.from_checkpoint(folder, device="cpu", cache=CACHE, tensor=2)
    engine = Engine(generator)
    if not generator.model.parallel.world.is_first:
        engine.follow()
        return "stopped"

    async def run() -> str:
        engine.start()
        generator._vocab_size = 1
        handle = engine.submit([[5]], [SamplingOptions(max_tokens=5, seed=1)])
        error = await handle.updates.get()
        late = await engine.submit([[5]], [SamplingOptions(max_tokens=5, seed=1)]).updates.get()
        assert late is error
        raise SystemError(error)

    return asyncio.run(run())


def test_the_other_ranks_do_not_outlive_the_first(world2: World, tmp_path: Path) -> None:
    """Its error is reported, and theirs is the lost connection."""
    with pytest.raises(AssertionError, match=r"SystemError: prompt 0 has the token 5, but the model has tokens"):
        world2.run(_first_dies, write_model(tmp_path), timeout=20)
