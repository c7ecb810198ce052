"""The same loop with the async API: three agents in one store. They fail halfway; run it again, and they resume."""

import asyncio

import backstay


async def model(messages: list[str]) -> str:  # a real model costs time and money
    await asyncio.sleep(0)
    return ["Book a train", "Book a hotel", "Pack warm clothes", "Done"][len(messages) - 1]


async def agent(store: backstay.AsyncStore, city: str) -> None:
    thread = store.thread(city)
    is_first_run = await thread.latest() is None
    async with thread.loop({"messages": [f"Plan a trip to {city}"]}) as loop:
        async for turn in loop:
            if is_first_run and turn.iteration == 3:
                return  # as if this agent's power failed here
            reply = await turn.call("model", model, turn.state["messages"])
            turn.append(messages=[reply])
            print(f"{city}, step {turn.iteration}: {reply}")
            if reply == "Done":
                loop.finish()


async def main() -> None:
    async with await backstay.aopen("agents.db") as store:
        await asyncio.gather(*(agent(store, city) for city in ("Oslo", "Turku", "Riga")))
        async for newest in store.threads():
            print(f"{newest.thread_id} is at step {newest.step}")


asyncio.run(main())
