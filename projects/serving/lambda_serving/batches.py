"""Images of several requests, computed together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Batches:
    """Collects images until there are enough of them, or the first has waited long enough.

    One thread computes. An image whose request was cancelled is left out. If a batch fails, its
    images are computed one by one, so only the request of a bad image fails.

    Args:
        compute: from images to the same number of results.
        most: images of a batch.
        wait: seconds that the first image waits for others.
        seen: called with the size of each batch.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Any]], Sequence[Any]],
        most: int,
        wait: float,
        seen: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._compute, self._most, self._wait, self._seen = compute, most, wait, seen
        self._queue: asyncio.Queue = asyncio.Queue()
        self._worker = asyncio.create_task(self._work())

    async def __call__(self, image: Any) -> Any:
        """The result of an image, or the error of its computation."""
        place = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((image, place))
        return await place

    async def close(self) -> None:
        """Compute the waiting images, and stop."""
        self._queue.put_nowait(None)
        await self._worker

    async def _work(self) -> None:
        loop, is_open = asyncio.get_running_loop(), True
        with ThreadPoolExecutor(1, "detector") as self._thread:
            while is_open:
                entries, end = [await self._queue.get()], loop.time() + self._wait
                while entries[-1] is not None and len(entries) < self._most:
                    try:  # waiting images are taken even after the time is over
                        rest = max(end - loop.time(), 0) if self._queue.empty() else None
                        entries.append(await asyncio.wait_for(self._queue.get(), rest))
                    except TimeoutError:
                        break
                is_open = entries[-1] is not None
                entries = [entry for entry in entries if entry and not entry[1].done()]
                if entries:
                    self._seen(len(entries))
                    await self._answer(entries)

    async def _answer(self, entries: list[tuple[Any, asyncio.Future]]) -> None:
        run = asyncio.get_running_loop().run_in_executor
        try:
            results = await run(self._thread, self._compute, [image for image, _ in entries])
        except Exception as error:
            if len(entries) == 1:
                results = [error]
            else:
                for entry in entries:
                    await self._answer([entry])
                return
        for (_, place), result in zip(entries, results, strict=True):
            if place.done():  # it was cancelled in the meantime
                continue
            if isinstance(result, Exception):
                place.set_exception(result)
            else:
                place.set_result(result)
