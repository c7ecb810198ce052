"""A plain agent loop, made durable by the three marked lines. It fails halfway; run it again, and it resumes."""

import backstay


def model(messages: list[str]) -> str:  # a real model costs time and money
    return ["Book a train", "Book a hotel", "Pack warm clothes", "Done"][len(messages) - 1]


thread = backstay.open("agent.db").thread("oslo")  # 1: open
is_first_run = thread.latest() is None

with thread.loop({"messages": ["Plan a trip to Oslo"]}) as loop:  # 2: load
    for turn in loop:
        if is_first_run and turn.iteration == 3:
            raise SystemExit("The power fails here. Run me again.")
        reply = turn.call("model", model, turn.state["messages"])  # paid for once
        turn.append(messages=[reply])  # 3: save
        print(f"step {turn.iteration}: {reply}")
        if reply == "Done":
            loop.finish()
print("Nothing is left to do.")
