"""The same loop with the async API: three agents at once in one store. It fails half-way; run it again."""

import asyncio

import holdfast


async def model(messages: list[str]) -> str:  # stands for a call that costs time and money
    await asyncio.sleep(0)
    return ["Book a train", "Book a hotel", "Pack warm clothes", "Done"][len(messages) - 1]


async def agent(store: holdfast.AsyncStore, city: str) -> None:
    thread = store.thread(city)
    saved = await thread.latest()
    messages = saved.messages if saved else [f"Plan a trip to {city}"]
    while messages[-1] != "Done":
        messages.append(await model(messages))
        await thread.save({"messages": messages})
        print(f"{city}, step {len(messages) - 1}: {messages[-1]}")
        if saved is None and len(messages) == 3:
            return  # this agent's power fails here


async def main() -> None:
    async with await holdfast.aopen("agents.db") as store:
        await asyncio.gather(*(agent(store, city) for city in ("Oslo", "Turku", "Riga")))
        async for newest in store.threads():
            print(f"{newest.thread_id} is at step {newest.step}")


asyncio.run(main())
