"""A plain agent loop, made durable by the three marked lines. It fails half-way; run it again and it goes on."""

import holdfast


def model(messages: list[str]) -> str:  # stands for a call that costs time and money
    return ["Book a train", "Book a hotel", "Pack warm clothes", "Done"][len(messages) - 1]


thread = holdfast.open("agent.db").thread("oslo")  # 1: open
saved = thread.latest()  # 2: load
messages = saved.messages if saved else ["Plan a trip to Oslo"]

while messages[-1] != "Done":
    messages.append(model(messages))
    thread.save({"messages": messages})  # 3: save
    print(f"step {len(messages) - 1}: {messages[-1]}")
    if saved is None and len(messages) == 3:
        raise SystemExit("The power fails here. Run me again.")
print("Nothing is left to do.")
