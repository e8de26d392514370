"""A conversation that goes on after a sleep: what was said before is not computed again.

python examples/kept_conversation.py [MODEL]     # vLLM 0.26 or 0.33, and a GPU
"""

import importlib.util
import os
import sys
from typing import Any

SAID = "The cache remembers what was said before. " * 30


def ask(llm: Any, messages: list[dict[str, str]], question: str) -> int:
    """Go on with the conversation; returns how many tokens of it were found in the prefix cache."""
    from vllm import SamplingParams

    messages.append({"role": "user", "content": question})
    (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    messages.append({"role": "assistant", "content": answer.outputs[0].text})
    cached = answer.num_cached_tokens or 0
    print(f"{cached} of {len(answer.prompt_token_ids)} tokens were in the cache", flush=True)
    return cached


def main(model: str = "Qwen/Qwen3-0.6B") -> None:
    """Ask, sleep, wake, and ask on."""
    os.environ.setdefault("CUMEM_SLEEP_KEEP_KV_BYTES", "auto")  # before vLLM starts its engine
    from vllm import LLM

    llm = LLM(model=model, enable_sleep_mode=True)
    messages: list[dict[str, str]] = []
    ask(llm, messages, SAID)
    llm.sleep(level=1)
    llm.wake_up()
    assert ask(llm, messages, "What does it remember?") > 0
    print("the conversation went on where it was")


if __name__ == "__main__":
    if importlib.util.find_spec("vllm") is None or os.environ.get("CUMEM_SLEEP_DRIVER") == "sim":
        raise SystemExit("kept_conversation.py needs vLLM 0.26 or 0.33, and a GPU")
    main(*sys.argv[1:2])
