"""What the gate needs of vLLM's engine client, in real vLLM environments."""

from __future__ import annotations

import inspect

from environment import skip_unless_vllm

skip_unless_vllm()


def test_requests_reach_the_engine_through_the_door_and_by_no_other_way(vllm_version: tuple[int, int]) -> None:
    from vllm.v1.engine import async_llm, core_client

    assert inspect.iscoroutinefunction(core_client.AsyncMPClient.add_request_async)
    source = inspect.getsource(async_llm)
    assert "engine_core.add_request_async(" in source
    assert source.count("engine_core.add_request") == source.count("engine_core.add_request_async(")
    assert "EngineCoreRequestType" not in source


def test_a_request_that_was_refused_can_be_forgotten(vllm_version: tuple[int, int]) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    if vllm_version >= (0, 18):
        assert {"request_id", "internal"} <= inspect.signature(AsyncLLM.abort).parameters.keys()


def test_what_is_queued_can_be_aborted_while_the_model_sleeps(vllm_version: tuple[int, int]) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    if "mode" in inspect.signature(AsyncLLM.sleep).parameters:
        assert {"mode", "clear_cache"} <= inspect.signature(AsyncLLM.pause_generation).parameters.keys()


def test_each_engine_of_data_parallelism_can_be_asked(vllm_version: tuple[int, int]) -> None:
    from vllm.v1.engine import core_client

    client = core_client.AsyncMPClient
    assert "engine" in inspect.signature(client._call_utility_async).parameters
    assert "self.core_engines" in inspect.getsource(core_client.MPClient.__init__)
    assert '"collective_rpc", method, timeout, args, kwargs' in inspect.getsource(client.collective_rpc_async)
    assert '"is_sleeping"' in inspect.getsource(client.is_sleeping_async)
    if hasattr(client, "is_scheduler_paused_async"):
        assert '"is_scheduler_paused"' in inspect.getsource(client.is_scheduler_paused_async)
