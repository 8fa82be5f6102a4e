"""One tenant's flood, over HTTP: others go on as if the cell were theirs as well."""

import asyncio
import hashlib
import json
from statistics import median

import httpx

from tests.system.serving import pagefleet_serve

SLOTS = 4
FLOOD = 120
TURNS = 8


async def complete(client: httpx.AsyncClient, key: str, answered: list[str]) -> None:
    """Ask for a short answer, and note whose it was when it is there."""
    headers = {"authorization": f"Bearer {key}"}
    body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    answered.append(key)


async def flood(url: str) -> list[int]:
    """For each request of a tenant, one after another: how many of the other's went by."""
    answered: list[str] = []
    went_by = []
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(FLOOD):
            group.create_task(complete(client, "loud", answered))
        while len(answered) < SLOTS:
            await asyncio.sleep(0.01)
        for _ in range(TURNS):
            before = answered.count("loud")
            await complete(client, "quiet", answered)
            went_by.append(answered.count("loud") - before)
    assert answered.count("loud") == FLOOD
    return went_by


def test_a_flood_of_one_tenant_does_not_delay_another(tmp_path):
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()}
        for name in ("loud", "quiet")
    ]
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    with pagefleet_serve(
        tmp_path,
        "--model=echo",
        "--engine=echo",
        "--step-seconds=0.01",
        f"--max-num-seqs={SLOTS}",
        f"--api-key-file={file}",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    ) as serving:
        went_by = asyncio.run(flood(serving.url))
    # One batch runs when a request comes, and another while it is answered. A turn in which this
    # process or the gateway stood still had more go by; behind the flood, all would have.
    assert median(went_by) <= 3 * SLOTS, went_by
